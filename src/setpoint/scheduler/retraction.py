"""Who gives up its memory when a decode step does not fit (FACTS §2.5). A pure function of a frozen view."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class RunningView:
    seq_id: int
    num_outputs: int
    num_input: int


def retraction_order(running: Iterable[RunningView]) -> list[int]:
    """seq_ids in the order they are retracted: fewest outputs first (least work lost), ties -> longest input, then the newest.

    ``running`` is in admission order.
    """
    ranked = sorted(enumerate(running), key=lambda item: (item[1].num_outputs, -item[1].num_input, -item[0]))
    return [view.seq_id for _, view in ranked]
