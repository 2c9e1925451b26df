"""Sequences that wait for something made outside the loop (a grammar) before they join the queue,
or join it again. They hold no memory and keep no other sequence from running; each keeps its place
in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from setpoint.core.messages import Prepared
from setpoint.core.preparation import Preparer
from setpoint.core.records import Observer, Outcome, PreparationEnded, PreparationStarted
from setpoint.scheduler.sequence import Sequence, Status


class Preparing:
    """Sequences in status PREPARING, in order of arrival."""

    def __init__(self, preparer: Preparer | None, observer: Observer) -> None:
        """Without a ``preparer`` no request needs to be prepared."""
        self._preparer = preparer
        self._observer = observer
        self._by_id: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._by_id

    def is_needed(self, seq: Sequence) -> bool:
        return self._preparer is not None and self._preparer.needs(seq.seq_id, seq.request)

    def start(self, seq: Sequence) -> None:
        assert self._preparer is not None
        seq.status = Status.PREPARING
        outputs = np.array(seq.outputs, np.int32)
        self._preparer.start(seq.seq_id, seq.request, outputs)
        self._by_id[seq.seq_id] = seq
        self._observer.on(PreparationStarted(seq.rid, seq.seq_id))

    def resume(self, seq: Sequence) -> None:
        """Let a sequence that has run wait until its grammar is ready."""
        assert self._preparer is not None
        assert seq.grammar is not None
        seq.status = Status.PREPARING
        self._preparer.make_ready(seq.seq_id, seq.grammar)
        self._by_id[seq.seq_id] = seq

    def take(self, message: Prepared) -> Sequence:
        """Remove and return the sequence, with its prepared grammar."""
        assert self._preparer is not None
        seq = self._by_id[message.seq_id]
        seq.grammar = self._preparer.take(message.seq_id)
        del self._by_id[message.seq_id]
        outcome: Outcome = "cached" if message.is_cached else "compiled"
        self._record_end(seq, "resumed" if seq.is_late else outcome, message.seconds)
        seq.is_late = False
        return seq

    def remove(self, seq: Sequence, outcome: Outcome, seconds: float) -> None:
        """Remove a sequence that ends before it is prepared, or because its preparation failed."""
        assert self._preparer is not None
        del self._by_id[seq.seq_id]
        self._preparer.cancel(seq.seq_id)
        self._record_end(seq, outcome, seconds)

    def _record_end(self, seq: Sequence, outcome: Outcome, seconds: float) -> None:
        constraint = seq.request.sampling.constraint
        kind = None if constraint is None else constraint.kind
        self._observer.on(PreparationEnded(seq.rid, seq.seq_id, kind, outcome, seconds))
