"""Who makes room for a more urgent request (docs/sglang/scheduling.md#priorities). A pure function
of a frozen view."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class RankedView:
    seq_id: int
    rank: int


def preemption_order(rank: int, running: Iterable[RankedView], threshold: int) -> list[int]:
    """seq_ids that a request of this rank may send back to the queue: worse by more than
    ``threshold``; the worst, then the newest, first.

    ``running`` is in admission order.
    """
    ranked = sorted(enumerate(running), key=lambda item: (-item[1].rank, -item[0]))
    return [view.seq_id for _, view in ranked if view.rank - rank > threshold]
