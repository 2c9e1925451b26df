"""Lists where requests are, for people who watch: the answer to a "requests" call."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from setpoint.scheduler.sequence import Sequence
from setpoint.scheduler.state import State

MAX_LISTED = 100
"""Most requests of each kind; the rest are only counted, so that a long queue costs no more."""


def listed(state: State) -> dict[str, Any]:
    """Numbers of sequences by where they are. queue: in the order of arrival. why: the reason why
    the head of the queue waits (``core.records.Refusal``), None if nothing waits or no step has
    been planned since. prefilling: the one whose prompt is in pieces. outputs: how many tokens each
    of those listed has that has any; the frontend gets most of them later if it does not stream."""
    retracted = [seq for seq in _first(state.queue) if seq.num_retractions]
    begun = [*retracted, *_first(state.running.values())]
    return {
        "preparing": _ids(state.preparing),
        "queue": _ids(state.queue),
        "retracted": [seq.seq_id for seq in retracted],
        "running": _ids(state.running.values()),
        "outputs": {seq.seq_id: len(seq.outputs) for seq in begun if seq.outputs},
        "prefilling": None if state.chunking is None else state.chunking.seq_id,
        "why": state.head_refusal if state.queue else None,
        "paused": state.pause,
        "num_preparing": len(state.preparing),
        "num_queued": len(state.queue),
        "num_running": len(state.running),
    }


def _ids(seqs: Iterable[Sequence]) -> list[int]:
    return [seq.seq_id for seq in _first(seqs)]


def _first(seqs: Iterable[Sequence]) -> Iterable[Sequence]:
    return islice(seqs, MAX_LISTED)
