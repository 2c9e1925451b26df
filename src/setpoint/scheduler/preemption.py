"""Chooses the running sequences that make room for a more urgent request
(docs/sglang/scheduling.md#priorities): a pure function of a frozen view."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class UrgencyView:
    seq_id: int
    urgency: int
    """Larger is more urgent."""


def preemption_order(urgency: int, running: Iterable[UrgencyView], threshold: int) -> list[int]:
    """The seq_ids that a request of this urgency may send back to the queue: those less urgent by
    more than ``threshold``, the least urgent first, the newest first among equals.

    ``running`` is in admission order.
    """
    ordered = sorted(enumerate(running), key=lambda item: (item[1].urgency, -item[0]))
    return [view.seq_id for _, view in ordered if urgency - view.urgency > threshold]
