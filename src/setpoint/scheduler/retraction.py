"""Chooses the sequence that gives up its memory when a decode step does not fit
(docs/sglang/scheduling.md#retraction): a pure function of a frozen view."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class RunningView:
    seq_id: int
    num_outputs: int
    num_input: int
    urgency: int = 0
    """Larger is more urgent; all equal if retraction goes by length alone."""


def retraction_order(running: Iterable[RunningView]) -> list[int]:
    """seq_ids in the order in which to retract them: least urgent first, then fewest outputs (least
    work lost), longest input, newest.

    ``running`` is in admission order.
    """
    ordered = sorted(
        enumerate(running),
        key=lambda item: (item[1].urgency, item[1].num_outputs, -item[1].num_input, -item[0]),
    )
    return [view.seq_id for _, view in ordered]
