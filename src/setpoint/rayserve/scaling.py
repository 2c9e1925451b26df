"""How many replicas there are to be, by what they report of their engines: requests that wait, and
the share of the KV pool in use. It follows the rule of Kubernetes' autoscaler: as many as would
bring the mean of each figure to its target, and the larger number of the two. Ray Serve applies
bounds and delays."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

QUEUE = "queue"
"""Requests that wait for the engine of a replica."""
USAGE = "token_usage"
"""The share of its KV pool in use, 0 to 1."""


class QueueAndUsage:
    """A policy of Ray Serve's autoscaler."""

    def __init__(self, queue_target: float, usage_target: float) -> None:
        self._targets = {QUEUE: queue_target, USAGE: usage_target}

    def __call__(self, ctx: Any) -> tuple[float, dict[str, Any]]:
        """ctx: Ray's AutoscalingContext. Returns the wanted number, and no state."""
        figures = {
            name: list(ctx.aggregated_metrics.get(name, {}).values()) for name in self._targets
        }
        if not all(figures.values()):  # nobody has reported yet
            return ctx.target_num_replicas, {}
        return wanted(ctx.current_num_replicas, figures, self._targets), {}


def wanted(
    now: int, figures: Mapping[str, Collection[float]], targets: Mapping[str, float]
) -> float:
    """The number of replicas that brings the mean of each figure to its target or below."""
    means = {name: sum(values) / len(values) for name, values in figures.items()}
    return now * max(means[name] / target for name, target in targets.items())
