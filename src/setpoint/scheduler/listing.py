"""Lists the requests by where they are: the answer to ListRequests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from setpoint.core.control import RequestList
from setpoint.scheduler.sequence import Sequence
from setpoint.scheduler.state import State

MAX_LISTED = 100
"""Most requests of each kind that are listed. The rest are only counted, so that a long queue costs
no more."""


def request_list(state: State) -> RequestList:
    """The requests in preparation, in the queue and running."""
    retracted = [seq for seq in _first(state.queue) if seq.num_retractions]
    begun = [*retracted, *_first(state.running.values())]
    return RequestList(
        preparing=_ids(state.preparing),
        queue=_ids(state.queue),
        retracted=[seq.seq_id for seq in retracted],
        running=_ids(state.running.values()),
        outputs={seq.seq_id: len(seq.outputs) for seq in begun if seq.outputs},
        prefilling=None if state.chunking is None else state.chunking.seq_id,
        why=state.head_refusal if state.queue else None,
        paused=state.pause,
        num_preparing=len(state.preparing),
        num_queued=len(state.queue),
        num_running=len(state.running),
    )


def _ids(seqs: Iterable[Sequence]) -> list[int]:
    return [seq.seq_id for seq in _first(seqs)]


def _first(seqs: Iterable[Sequence]) -> Iterable[Sequence]:
    return islice(seqs, MAX_LISTED)
