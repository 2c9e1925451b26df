"""How many replicas there are to be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rayserve.scaling import QUEUE, USAGE, QueueAndUsage


def context(now: int, **metrics: dict[str, float]) -> SimpleNamespace:
    return SimpleNamespace(
        current_num_replicas=now, target_num_replicas=now, aggregated_metrics=metrics
    )


@pytest.mark.parametrize(
    ("now", "queue", "usage", "expected"),
    [
        (2, [4, 4], [0.4, 0.4], 2),  # as many wait as are meant to
        (2, [12, 4], [0.1, 0.1], 4),  # twice as many
        (2, [0, 0], [0.8, 0.8], 2),
        (1, [0], [1.0], 1.25),  # the pool is full
        (3, [1, 0, 0], [0.1, 0.1, 0.1], 0.375),
        (2, [0, 0], [0, 0], 0),  # nothing to do: Ray's bounds say how few
    ],
)
def test_the_larger_figure_counts(
    now: int, queue: list[float], usage: list[float], expected: float
) -> None:
    metrics = {
        QUEUE: dict(zip("abc", queue, strict=False)),
        USAGE: dict(zip("abc", usage, strict=False)),
    }
    number, state = QueueAndUsage(4, 0.8)(context(now, **metrics))
    assert number == pytest.approx(expected)
    assert state == {}


def test_without_reports_nothing_changes() -> None:
    assert QueueAndUsage(4, 0.8)(context(3)) == (3, {})
    assert QueueAndUsage(4, 0.8)(context(3, queue={"a": 9.0})) == (3, {})
