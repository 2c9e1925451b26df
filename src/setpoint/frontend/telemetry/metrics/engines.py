"""The scheduler's series as ``/metrics`` shows them: what the present engine says, added to what
those before it counted, so that no counter goes back when an engine is replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from setpoint.core.control import (
    EngineFacts,
    ExpertLoads,
    InternalState,
    MetricsReport,
    TierState,
)
from setpoint.core.handover import HandoverCounts
from setpoint.observe.catalogue import BY_NAME, REQUESTS_PER_KEY
from setpoint.observe.series import Histogram

Values = dict[str, dict[str, float]]
"""Name of a series -> value of its own label ("" without one) -> value."""
Samples = dict[str, dict[tuple[str, ...], float]]
"""Name of a series -> values of its own labels -> value."""
Histograms = dict[str, dict[str, Histogram]]
"""The same for histograms."""


class RankFigures:
    """The last known figures of the engines of one rank, one after the other."""

    def __init__(self, *, context_len: int, page_size: int, overlap: bool = False) -> None:
        """overlap: whether steps are planned while the one before still runs."""
        self._overlap = str(overlap).lower()
        self._constants = {"sglang:context_len": context_len, "sglang:page_size": page_size}
        self._life: object = None
        """The engine that ``_latest`` is of."""
        self._latest = MetricsReport()
        """Its own part of the page."""
        self._before: Values = {}
        """Counters of the engines before it."""
        self._past: Histograms = {}
        """Histograms of the engines before it."""
        self.gauges: Samples = {}

    def take(self, life: object, facts: EngineFacts, state: InternalState) -> None:
        """Take the figures of an engine. life: the same object as long as it is the same engine."""
        if life is not self._life:
            self._before, self._past = self._counters(), self.histograms()
            self._life = life
        self._latest = _with_tiers(state.report.metrics or MetricsReport(), state.report.tiers)
        present = _present(facts, state) | self._constants
        pages = present["sglang:max_total_num_tokens"] // present["sglang:page_size"]
        self.gauges = {name: {(): value} for name, value in present.items()}
        self.gauges["sglang:num_pages"] = {(): pages}
        self.gauges["sglang:graph_memory_usage_gb"] = {("all",): state.report.memory_usage.graph}
        self.gauges["sglang:routing_key_running_req_count"] = _by_range(state.running_per_key)
        self.gauges["sglang:routing_key_all_req_count"] = _by_range(state.open_per_key)
        self.gauges |= _of_experts(state.report.experts)
        self.gauges |= _of_handovers(state.handover)
        self.gauges |= {name: _samples(values) for name, values in self._latest.gauges.items()}

    def samples(self) -> dict[str, dict[tuple[str, ...], Any]]:
        """All series, by the values of their own labels -> a number or a Histogram."""
        found: dict[str, dict[tuple[str, ...], Any]] = {**self.gauges, **self._counter_samples()}
        for name, by_label in self.histograms().items():
            found[name] = {(label,) if label else (): value for label, value in by_label.items()}
        return found

    def _counter_samples(self) -> Samples:
        """Counters of all engines together, by the values of their labels."""
        found = {name: _samples(values) for name, values in self._counters().items()}
        turns = found.get("setpoint:turn_seconds", {})
        found["sglang:scheduler_stage_seconds"] = {
            ("run_batch" if part == "model" else part, self._overlap): seconds
            for (part,), seconds in turns.items()
        }
        return found

    def _counters(self) -> Values:
        """Counters of all engines together."""
        summed = {name: dict(values) for name, values in self._before.items()}
        for name, values in self._latest.counters.items():
            of_series = summed.setdefault(name, {})
            for label, value in values.items():
                of_series[label] = of_series.get(label, 0) + value
        return summed

    def histograms(self) -> Histograms:
        """Histograms of all engines together."""
        summed = {name: dict(values) for name, values in self._past.items()}
        for name, values in self._latest.histograms.items():
            of_series = summed.setdefault(name, {})
            for label, plain in values.items():
                histogram = Histogram(BY_NAME[name].buckets)
                histogram.add(plain)
                if label in of_series:
                    histogram.add(of_series[label].snapshot())
                of_series[label] = histogram
        return summed


def _present(facts: EngineFacts, state: InternalState) -> dict[str, float]:
    """The gauges of a scheduler's present state."""
    pool, report = state.pool, state.report
    usage = round(pool.usage, 4)
    return {
        "sglang:num_running_reqs": state.num_running,
        "sglang:num_queue_reqs": state.num_waiting,
        "sglang:num_grammar_queue_reqs": state.num_preparing - state.num_loading,
        "sglang:num_paused_reqs": state.num_paused_reqs,
        "sglang:prefill_queue_depth": state.num_waiting - state.num_retracted,
        "sglang:decode_queue_depth": state.num_retracted,
        "sglang:startup_available_gpu_memory_gb": facts.available_bytes / (1 << 30),
        "sglang:num_unique_running_routing_keys": state.num_routing_keys,
        "sglang:decode_sum_seq_lens": state.num_running_tokens,
        "sglang:token_usage": usage,
        "sglang:full_token_usage": usage,
        "sglang:num_used_tokens": pool.used,
        "sglang:kv_used_tokens": pool.used,
        "sglang:kv_available_tokens": pool.free,
        "sglang:kv_evictable_tokens": pool.evictable,
        "sglang:utilization": state.utilization,
        "sglang:new_token_ratio": report.figures.new_token_ratio,
        "sglang:max_total_num_tokens": facts.max_total_num_tokens,
        "sglang:weight_memory_usage_gb": report.memory_usage.weight,
        "sglang:kv_cache_memory_usage_gb": report.memory_usage.kvcache,
    }


def _of_handovers(counts: HandoverCounts | None) -> Samples:
    if counts is None:
        return {}
    waiting, moving = (
        ("prefill_bootstrap", "prefill_inflight")
        if counts.role == "prefill"
        else ("decode_prealloc", "decode_transfer")
    )
    return {
        f"sglang:num_{waiting}_queue_reqs": {(): counts.num_waiting},
        f"sglang:num_{moving}_queue_reqs": {(): counts.num_moving},
    }


def _of_experts(loads: ExpertLoads | None) -> Samples:
    if loads is None:
        return {}
    by_rank: dict[tuple[str, ...], float] = {
        (str(rank),): number for rank, number in enumerate(loads.rank_tokens)
    }
    return {
        "sglang:eplb_balancedness": {(): loads.eplb_balancedness},
        "setpoint:expert_balancedness": {(): loads.balancedness},
        "setpoint:unused_experts": {(): loads.num_unused},
        "setpoint:expert_rebalances": {(): loads.num_rebalances},
        "setpoint:expert_rank_tokens": by_rank,
    }


def _with_tiers(metrics: MetricsReport, tiers: TierState | None) -> MetricsReport:
    """The engine's own metrics and those of its cache tiers."""
    if tiers is None:
        return metrics
    seconds = {"load": tiers.load_s, "save": tiers.save_s, "earned": tiers.earned_s}
    counters: Values = {
        "sglang:prefetched_tokens": {"": tiers.loaded_tokens},
        "sglang:backuped_tokens": {"": tiers.saved_tokens},
        "sglang:storage_prefetch_unfulfilled_tokens": {**tiers.missed_tokens},
        "sglang:hicache_dropped_tokens": {**tiers.dropped_tokens},
        "setpoint:cache_tier_seconds": seconds,
        "setpoint:cache_tier_lost_blocks": {**tiers.lost_blocks},
    }
    gauges: Values = {
        "setpoint:cache_tier_off": {"": float(bool(tiers.off))},
        "setpoint:cache_tier_thrifty": {"": float(tiers.saves_selectively)},
        "setpoint:cache_tier_blocks": {"": tiers.num_blocks},
        "setpoint:cache_tier_bytes": {"": tiers.num_bytes},
    }
    return MetricsReport(
        counters=metrics.counters | counters,
        gauges=metrics.gauges | gauges,
        histograms=metrics.histograms,
    )


def _samples(values: dict[str, float]) -> dict[tuple[str, ...], float]:
    return {(label,) if label else (): value for label, value in values.items()}


def _by_range(counts: Sequence[int]) -> dict[tuple[str, ...], float]:
    """How many of the counts lie in each range, by the bound that they exceed and the one that they
    do not: a histogram of the present, whose ranges are not summed."""

    def ranges() -> Iterator[tuple[tuple[str, ...], float]]:
        bounds = (0, *REQUESTS_PER_KEY, float("inf"))
        for low, high in pairwise(bounds):
            shown = "+Inf" if high == float("inf") else str(high)
            yield (str(low), shown), sum(low < count <= high for count in counts)

    return dict(ranges())
