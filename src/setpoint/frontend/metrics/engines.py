"""The scheduler's series as ``/metrics`` shows them: what the present engine says, added to what
those before it counted, so that no counter goes back when an engine is replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from setpoint.observe.catalogue import BY_NAME
from setpoint.observe.series import Histogram

Values = dict[str, dict[str, float]]
"""Name of a series -> value of its own label ("" without one) -> value."""
Histograms = dict[str, dict[str, Histogram]]
"""The same for histograms."""


class EngineFigures:
    """The last known figures of the engines, one after the other."""

    def __init__(self, *, context_len: int, page_size: int) -> None:
        self._constants = {"sglang:context_len": context_len, "sglang:page_size": page_size}
        self._life: object = None
        """The engine that ``_latest`` is of."""
        self._latest: Mapping[str, Any] = {}
        """Its ``EngineMetrics.info``."""
        self._before: Values = {}
        """Counters of the engines before it."""
        self._past: Histograms = {}
        """Histograms of the engines before it."""
        self.gauges: Values = {}

    def take(self, life: object, ready: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Take the figures of an engine. life: the same object as long as it is the same engine.
        ready: what it reported when it was ready. state: its answer to a "state" call."""
        if life is not self._life:
            self._before, self._past = self.counters(), self.histograms()
            self._life = life
        self._latest = state["metrics"]
        present = _present(ready, state) | self._constants
        pages = present["sglang:max_total_num_tokens"] // present["sglang:page_size"]
        self.gauges = {name: {"": value} for name, value in present.items()}
        self.gauges["sglang:num_pages"] = {"": pages}
        self.gauges["sglang:graph_memory_usage_gb"] = {"all": state["memory_usage"]["graph"]}
        self.gauges |= self._latest["gauges"]

    def counters(self) -> Values:
        """Counters of all engines together."""
        summed = {name: dict(values) for name, values in self._before.items()}
        for name, values in self._latest.get("counters", {}).items():
            of_series = summed.setdefault(name, {})
            for label, value in values.items():
                of_series[label] = of_series.get(label, 0) + value
        return summed

    def histograms(self) -> Histograms:
        """Histograms of all engines together."""
        summed = {name: dict(values) for name, values in self._past.items()}
        for name, values in self._latest.get("histograms", {}).items():
            of_series = summed.setdefault(name, {})
            for label, plain in values.items():
                histogram = Histogram(BY_NAME[name].buckets)
                histogram.add(plain)
                if label in of_series:
                    histogram.add(of_series[label].plain())
                of_series[label] = histogram
        return summed


def _present(ready: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, float]:
    """The gauges of a scheduler's present state."""
    pool, total = state["pool"], state["pool"]["total"]
    used = total - pool["free"] - pool["evictable"]
    usage = used / total if total else 0.0
    return {
        "sglang:num_running_reqs": state["num_running"],
        "sglang:num_queue_reqs": state["num_queued"] - state["num_preparing"],
        "sglang:num_grammar_queue_reqs": state["num_preparing"],
        "sglang:num_paused_reqs": state["num_paused_reqs"],
        "sglang:num_unique_running_routing_keys": state["num_routing_keys"],
        "sglang:decode_sum_seq_lens": state["num_running_tokens"],
        "sglang:token_usage": round(usage, 4),
        "sglang:full_token_usage": round(usage, 4),
        "sglang:num_used_tokens": used,
        "sglang:kv_used_tokens": used,
        "sglang:kv_available_tokens": pool["free"],
        "sglang:kv_evictable_tokens": pool["evictable"],
        "sglang:utilization": max(usage, state["num_running"] / ready["max_running_requests"]),
        "sglang:new_token_ratio": state["new_token_ratio"],
        "sglang:max_total_num_tokens": ready["max_total_num_tokens"],
        "sglang:weight_memory_usage_gb": state["memory_usage"]["weight"],
        "sglang:kv_cache_memory_usage_gb": state["memory_usage"]["kvcache"],
    }
