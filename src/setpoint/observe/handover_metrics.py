"""The part of ``/metrics`` about prompts that move from a prefill to a decode server. There is none
of it before the first such prompt."""

from __future__ import annotations

from setpoint.core.control import HistogramCounts
from setpoint.core.records import HandedOver
from setpoint.observe.catalogue import BY_NAME
from setpoint.observe.series import Histogram

NAMES = ("speed_gb_s", "latency_ms", "total_mb", "bootstrap_ms", "alloc_ms")


class HandoverMetrics:
    def __init__(self) -> None:
        self._is_used = False
        self._num_unbegun = 0
        self._num_failed = 0
        self._histograms = {
            name: Histogram(BY_NAME[f"sglang:kv_transfer_{name}"].buckets) for name in NAMES
        }

    def take(self, record: HandedOver) -> None:
        self._is_used = True
        if record.why:
            self._num_failed += 1
            self._num_unbegun += not record.num_bytes
            return
        values = {
            "latency_ms": record.seconds * 1e3,
            "total_mb": record.num_bytes / 1e6,
            "bootstrap_ms": record.waited_s * 1e3,
            "alloc_ms": record.room_s * 1e3,
        }
        if record.seconds and record.num_bytes:
            values["speed_gb_s"] = record.num_bytes / record.seconds / 1e9
        for name, value in values.items():
            self._histograms[name].observe(value)

    def counters(self) -> dict[str, dict[str, float]]:
        if not self._is_used:
            return {}
        return {
            "sglang:num_bootstrap_failed_reqs": {"": self._num_unbegun},
            "sglang:num_transfer_failed_reqs": {"": self._num_failed},
        }

    def histograms(self) -> dict[str, dict[str, HistogramCounts]]:
        if not self._is_used:
            return {}
        return {
            f"sglang:kv_transfer_{name}": {"": found.snapshot()}
            for name, found in self._histograms.items()
        }
