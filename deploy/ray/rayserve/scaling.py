"""Computes the number of replicas from the figures that they report: waiting requests, and the
share of the KV pool in use. The rule is that of Kubernetes' autoscaler: the number that brings the
mean of each figure to its target, and the larger of the two numbers. Ray Serve applies bounds and
delays."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

QUEUE = "queue"
"""Number of requests that wait for the engine of a replica."""
USAGE = "token_usage"
"""The share of a replica's KV pool that is in use, from 0 to 1."""


class QueueAndUsage:
    """A policy of Ray Serve's autoscaler."""

    def __init__(self, queue_target: float, usage_target: float) -> None:
        self._targets = {QUEUE: queue_target, USAGE: usage_target}

    def __call__(self, ctx: Any) -> tuple[float, dict[str, Any]]:
        """Returns the wanted number of replicas, and an empty state. ctx: Ray's
        AutoscalingContext."""
        figures = {
            name: list(ctx.aggregated_metrics.get(name, {}).values()) for name in self._targets
        }
        if not all(figures.values()):  # no replica has reported yet
            return ctx.target_num_replicas, {}
        return wanted(ctx.current_num_replicas, figures, self._targets), {}


def wanted(
    now: int, figures: Mapping[str, Collection[float]], targets: Mapping[str, float]
) -> float:
    """The number of replicas that brings the mean of each figure to its target or below."""
    means = {name: sum(values) / len(values) for name, values in figures.items()}
    return now * max(means[name] / target for name, target in targets.items())
