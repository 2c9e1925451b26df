"""Figures of the whole engine: the rates and totals that log lines, ``/server_info``, ``/v1/loads``
and ``/metrics`` show. Reads the engine's records."""

from __future__ import annotations

from setpoint.core.control import EngineFigures, Totals, TurnSums
from setpoint.core.records import (
    Fallback,
    PoolRebuilt,
    Preemption,
    Record,
    RequestAdmitted,
    RequestClipped,
    RequestDone,
    Retraction,
    SendFailed,
    SettingsChanged,
    StepDone,
    Turn,
    TurnDone,
)


class Figures:
    """Keeps the totals and the rates; the rates begin with the first turn."""

    def __init__(self, *, decode_log_interval: int) -> None:
        self._interval = decode_log_interval
        self._last_prefill: float | None = None
        """Clock seconds, like ``_last_decode``; None before the first turn."""
        self._last_decode = 0.0
        self._num_generated = 0
        """Tokens since the last ``gen_throughput``."""
        self._num_decodes = 0
        self._ratio = 0.0
        self.input_throughput = 0.0
        """Tokens per second: the tokens of the last prefill step, divided by the time since the
        prefill step before it."""
        self.gen_throughput = 0.0
        """Tokens per second over the last ``decode_log_interval`` decode steps, including the time
        between them."""
        self.elapsed_s = 0.0
        """Seconds that the throughput computed last is about."""
        self.totals = Totals()
        self.turns = {"prefill": TurnSums(), "decode": TurnSums()}
        """Sums over the turns that planned a step, by its kind: "prefill" if it computed any prompt
        tokens, else "decode"."""
        self.fallbacks: list[Fallback] = []

    @property
    def decode_is_due(self) -> bool:
        """Whether the step just read completed a ``gen_throughput``."""
        return self._num_decodes > 0 and self._num_decodes % self._interval == 0

    def on(self, record: Record) -> None:
        totals = self.totals
        match record:
            case StepDone():
                self._step(record)
            case TurnDone():
                sums = self.turns["prefill" if record.prefill else "decode"]
                sums.num_steps += 1
                sums.turn_s += record.turn_s
                sums.plan_s += record.plan_s
                sums.model_s += record.model_s
                sums.link_s += record.link_s
            case Turn(at):
                if self._last_prefill is None:
                    self._last_prefill = self._last_decode = at
            case RequestAdmitted():
                totals.admissions += 1
            case RequestDone():
                count_end(totals, record)
            case Retraction(num_seqs):
                totals.retracted += num_seqs
            case Preemption(_, preempted):
                totals.preempted += len(preempted)
            case RequestClipped():
                totals.clipped += 1
            case SendFailed():
                totals.sends_failed += 1
            case PoolRebuilt():
                totals.pools_rebuilt += 1
            case SettingsChanged():
                self._interval = record.settings.decode_log_interval
            case Fallback():
                self.fallbacks.append(record)

    def report(self) -> EngineFigures:
        totals = self.totals
        asked = totals.cached_tokens + totals.prompt_tokens
        return EngineFigures(
            last_gen_throughput=self.gen_throughput,
            cache_hit_rate=totals.cached_tokens / asked if asked else 0.0,
            new_token_ratio=self._ratio,
            totals=totals,
            fallbacks=[f"{fallback.what} ({fallback.why})" for fallback in self.fallbacks],
        )

    def _step(self, step: StepDone) -> None:
        count_step(self.totals, step)
        self._ratio = step.new_token_ratio
        self._num_generated += step.num_sampled
        if step.num_prefill_rows:
            elapsed = step.finished_at - (self._last_prefill or 0.0)
            self._last_prefill = step.finished_at
            self.input_throughput = step.num_new_tokens / elapsed if elapsed > 0 else 0.0
            self.elapsed_s = elapsed
            return
        self._num_decodes += 1
        if self.decode_is_due:
            elapsed = step.finished_at - self._last_decode
            self._last_decode = step.finished_at
            self.gen_throughput = self._num_generated / elapsed if elapsed > 0 else 0.0
            self.elapsed_s = elapsed
            self._num_generated = 0


def _add(counts: dict[str, int], name: str, count: int = 1) -> None:
    counts[name] = counts.get(name, 0) + count


def count_step(totals: Totals, step: StepDone) -> None:
    """Add what a step did to totals of any time."""
    _add(totals.steps, step.way)
    totals.forward_s += step.forward_s
    totals.sample_s += step.sample_s
    totals.prompt_tokens += step.num_new_tokens
    totals.cached_tokens += step.num_cached_tokens
    totals.output_tokens += step.num_sampled
    for reason, count in step.refusals.items():
        _add(totals.refusals, reason, count)


def count_end(totals: Totals, done: RequestDone) -> None:
    """Add a request's end and its times to totals of any time."""
    _add(totals.ended, done.finish.how)
    if done.accepted_at is None:
        return
    if done.admitted_at is not None:
        totals.queue_s += done.admitted_at - done.accepted_at
    if done.first_token_at is not None:
        totals.first_token_s += done.first_token_at - done.accepted_at
        totals.decode_s += done.ended_at - done.first_token_at
