"""The scheduler's part of ``/metrics``: cumulative counts and distributions since the engine
started. Reads the engine's records; the frontend asks for its ``report`` at each scrape."""

from __future__ import annotations

import time
from typing import get_args

from setpoint.core.control import MetricsReport
from setpoint.core.preparation import Need
from setpoint.core.records import (
    GrammarLate,
    HandedOver,
    Outcome,
    PreparationEnded,
    Record,
    RequestAdmitted,
    RequestDone,
    Retraction,
    StepDone,
    Turn,
)
from setpoint.core.result import EAGER
from setpoint.observe.catalogue import BY_NAME
from setpoint.observe.figures import Figures
from setpoint.observe.handover_metrics import HandoverMetrics
from setpoint.observe.series import Histogram
from setpoint.observe.work import WorkMeter

IDLE_S = 30.0
"""After this time without a step the throughput counts as 0."""

Values = dict[str, dict[str, float]]
"""Name of a series -> value of its own label ("" without one) -> value."""


class EngineMetrics:
    def __init__(self, figures: Figures, work: WorkMeter | None = None) -> None:
        """figures, work: must get each record before this object does."""
        self._figures = figures
        self._work = work
        self._now = 0.0
        """Clock seconds of the latest turn, like ``_began``; 0 before the first one."""
        self._began = 0.0
        self._last: StepDone | None = None
        self._hit_rate = 0.0
        self._num_retracted = 0
        """Requests retracted since the last 'Decode batch' line."""
        self._retracted_inputs = self._retracted_outputs = 0
        """Tokens of all retracted requests."""
        self._passes: dict[str, float] = {}
        self._num_forced = 0
        self._forward_s = {"extend": 0.0, "mixed": 0.0, "decode": 0.0}
        self._first_prompts = {"input": 0.0, "device_hit": 0.0}
        self._grammars = dict.fromkeys(get_args(Outcome), 0)
        self._num_late = 0
        self._late: set[int] = set()
        """Ids of the sequences that wait for their grammar again."""
        self._handovers = HandoverMetrics()
        self._compiling = _histogram("sglang:grammar_compilation_time_seconds")
        self._queue_time = _histogram("sglang:queue_time_seconds")
        self._stages = {
            stage: _histogram("sglang:per_stage_req_latency_seconds")
            for stage in ("prefill_waiting", "prefill_forward", "decode_forward")
        }

    def on(self, record: Record) -> None:
        match record:
            case StepDone():
                self._step(record)
            case Turn(at):
                self._now = at
                self._began = self._began or at
            case RequestAdmitted():
                if record.num_retractions == 0:
                    self._queue_time.observe(record.waited_s)
                self._stages["prefill_waiting"].observe(record.waited_s)
            case RequestDone():
                self._done(record)
            case GrammarLate():
                self._num_late += 1
                self._late.add(record.seq_id)
            case PreparationEnded() if record.need is not Need.GRAMMAR:
                pass
            case HandedOver():
                self._handovers.take(record)
            case PreparationEnded() if record.seq_id in self._late:
                self._late.remove(record.seq_id)  # it was counted when it was prepared
            case PreparationEnded(need=Need.GRAMMAR):
                self._grammars[record.outcome] += 1
                if record.outcome == "compiled":
                    self._compiling.observe(record.seconds)
            case Retraction():
                self._num_retracted += record.num_seqs
                self._retracted_inputs += record.num_input_tokens
                self._retracted_outputs += record.num_output_tokens

    def report(self) -> MetricsReport:
        return MetricsReport(
            counters=self._counters(),
            gauges=self._gauges(),
            histograms={
                "sglang:queue_time_seconds": {"": self._queue_time.snapshot()},
                "sglang:grammar_compilation_time_seconds": {"": self._compiling.snapshot()},
                "sglang:per_stage_req_latency_seconds": {
                    stage: histogram.snapshot() for stage, histogram in self._stages.items()
                },
                **self._handovers.histograms(),
            },
        )

    def _step(self, step: StepDone) -> None:
        self._last = step
        prefill = step.num_prefill_rows > 0
        graph = "none" if step.way == EAGER else "cuda_graph"
        mode = f"{'prefill' if prefill else 'decode'}_{graph}"
        self._passes[mode] = self._passes.get(mode, 0) + 1
        category = "decode" if not prefill else "mixed" if step.num_decode_rows else "extend"
        self._forward_s[category] += step.forward_s
        self._num_forced += step.num_forced
        if prefill:
            total = step.num_cached_tokens + step.num_new_tokens
            self._hit_rate = step.num_cached_tokens / total if total else 0.0
        elif self._figures.decode_is_due:
            self._num_retracted = 0

    def _done(self, done: RequestDone) -> None:
        if done.admitted_at is None:
            return
        self._first_prompts["input"] += done.num_prompt - done.num_cached
        self._first_prompts["device_hit"] += done.num_cached
        if done.first_token_at is not None:
            self._stages["prefill_forward"].observe(done.first_token_at - done.admitted_at)
            self._stages["decode_forward"].observe(done.ended_at - done.first_token_at)

    def _counters(self) -> Values:
        totals, turns, grammars = self._figures.totals, self._turn_seconds(), self._grammars
        busy = sum(turns.values())
        return {
            "sglang:num_retracted_requests": {"": totals.retracted},
            "sglang:num_retracted_input_tokens": {"": self._retracted_inputs},
            "sglang:num_retracted_output_tokens": {"": self._retracted_outputs},
            "sglang:cuda_graph_passes": self._passes,
            "sglang:realtime_tokens": {
                "prefill_compute": totals.prompt_tokens,
                "prefill_cache": totals.cached_tokens,
                "decode": totals.output_tokens,
            },
            "sglang:prefill_effective_tokens": self._first_prompts,
            "sglang:forward_execution_seconds": self._forward_s,
            "sglang:scheduler_idle_seconds": {"": max(self._now - self._began - busy, 0.0)},
            "sglang:scheduler_process_cpu_seconds": {"": time.process_time()},
            "sglang:num_grammar": {"": sum(grammars.values())},
            "sglang:num_grammar_cache_hit": {"": grammars["cached"]},
            "sglang:num_grammar_aborted": {"": grammars["refused"] + grammars["aborted"]},
            "sglang:num_grammar_timeout": {"": grammars["timed_out"]},
            "setpoint:forced_tokens": {"": self._num_forced},
            "setpoint:late_grammars": {"": self._num_late},
            "setpoint:queue_refusals": {str(why): n for why, n in totals.refusals.items()},
            "setpoint:ended_requests": dict(totals.ended),
            "setpoint:preempted_requests": {"": totals.preempted},
            "setpoint:clipped_requests": {"": totals.clipped},
            "setpoint:failed_sends": {"": totals.sends_failed},
            "setpoint:rebuilt_pools": {"": totals.pools_rebuilt},
            "setpoint:turn_seconds": turns,
            **self._handovers.counters(),
            **(self._work.counters() if self._work is not None else {}),
        }

    def _turn_seconds(self) -> dict[str, float]:
        prefill, decode = self._figures.turns["prefill"], self._figures.turns["decode"]
        parts = {
            "plan": prefill.plan_s + decode.plan_s,
            "model": prefill.model_s + decode.model_s,
            "link": prefill.link_s + decode.link_s,
        }
        return parts | {"rest": prefill.turn_s + decode.turn_s - sum(parts.values())}

    def _gauges(self) -> Values:
        """The gauges that follow from records; the others show the scheduler's present state."""
        last, figures = self._last, self._figures
        is_recent = last is not None and self._now - last.finished_at < IDLE_S
        return {
            "sglang:gen_throughput": {"": figures.gen_throughput if is_recent else 0.0},
            "sglang:cache_hit_rate": {"": self._hit_rate},
            "sglang:num_retracted_reqs": {"": self._num_retracted},
            "sglang:is_cuda_graph": {"": float(last is not None and last.way != EAGER)},
            "setpoint:fallbacks": {"": len(figures.fallbacks)},
        }


def _histogram(name: str) -> Histogram:
    return Histogram(BY_NAME[name].buckets)
