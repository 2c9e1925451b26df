"""Sequences that wait for something made or brought outside the loop before they join the queue, or
join it again. They hold no slot and keep no other sequence from running; each keeps its place in
the order of arrival.

A sequence has a set of needs (``core.preparation.Need``). Each need begins and ends by itself, and
whoever meets needs of a kind decides what a failure means; here the set is kept, and recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from setpoint.core.messages import Prepared
from setpoint.core.preparation import Need, Preparer
from setpoint.core.records import Observer, Outcome, PreparationEnded, PreparationStarted
from setpoint.scheduler.sequence import Sequence, Status


class Preparing:
    """Sequences in status PREPARING, in order of arrival."""

    def __init__(self, preparer: Preparer | None, observer: Observer) -> None:
        """Without a ``preparer`` no request needs a grammar."""
        self._preparer = preparer
        self._observer = observer
        self._by_id: dict[int, Sequence] = {}
        self.cancel: dict[Need, Callable[[int], None]] = (
            {} if preparer is None else {Need.GRAMMAR: preparer.cancel}
        )
        """For each need, what stops the work for a sequence that does not wait any more. Written by
        ``State``."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._by_id

    def __getitem__(self, seq_id: int) -> Sequence:
        return self._by_id[seq_id]

    def num_with(self, need: Need) -> int:
        """Number of sequences that have this need."""
        return sum(need in seq.needs for seq in self._by_id.values())

    def needs_grammar(self, seq: Sequence) -> bool:
        return self._preparer is not None and self._preparer.needs(seq.seq_id, seq.request)

    def begin(self, seq: Sequence, need: Need) -> None:
        """Let the sequence wait for one thing more. The caller has begun, or begins, the work."""
        assert need not in seq.needs
        seq.status = Status.PREPARING
        seq.needs.add(need)
        self._by_id.setdefault(seq.seq_id, seq)
        self._observer.on(PreparationStarted(seq.rid, seq.seq_id, need))

    def start_grammar(self, seq: Sequence) -> None:
        assert self._preparer is not None
        outputs = np.array(seq.outputs, np.int32)
        self._preparer.start(seq.seq_id, seq.request, outputs)
        self.begin(seq, Need.GRAMMAR)

    def resume(self, seq: Sequence) -> None:
        """Let a sequence that has run wait until its grammar is ready."""
        assert self._preparer is not None
        assert seq.grammar is not None
        seq.status = Status.PREPARING
        self._preparer.make_ready(seq.seq_id, seq.grammar)
        seq.needs.add(Need.GRAMMAR)
        self._by_id[seq.seq_id] = seq

    def take_grammar(self, message: Prepared) -> Sequence:
        """Give the sequence its prepared grammar, which ends that need."""
        assert self._preparer is not None
        seq = self._by_id[message.seq_id]
        seq.grammar = self._preparer.take(message.seq_id)
        outcome: Outcome = "cached" if message.is_cached else "compiled"
        self.end(seq, Need.GRAMMAR, "resumed" if seq.is_late else outcome, message.seconds)
        seq.is_late = False
        return seq

    def end(self, seq: Sequence, need: Need, outcome: Outcome, seconds: float = 0.0) -> None:
        """End a need of the sequence, which leaves once it has none."""
        seq.needs.remove(need)
        if not seq.needs:
            del self._by_id[seq.seq_id]
        self._record_end(seq, need, outcome, seconds)

    def remove(self, seq: Sequence, outcome: Outcome, seconds: float) -> None:
        """Remove a sequence that ends before its needs are met, or because one of them failed."""
        for need in sorted(seq.needs):
            self.cancel[need](seq.seq_id)
            self.end(seq, need, outcome, seconds)

    def _record_end(self, seq: Sequence, need: Need, outcome: Outcome, seconds: float) -> None:
        constraint = seq.request.sampling.constraint
        kind = None if constraint is None or need is not Need.GRAMMAR else constraint.kind
        self._observer.on(PreparationEnded(seq.rid, seq.seq_id, kind, outcome, seconds, need))
