"""The waiting queue: sequences in order of arrival; any of them can be removed in O(1)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from setpoint.scheduler.sequence import Sequence, Status


class WaitingQueue:
    """Sequences in status WAITING, in queue order. A retracted sequence goes to the end."""

    def __init__(self) -> None:
        self._by_id: dict[int, Sequence] = {}
        self._num_places = 0
        self.num_tokens = 0
        """Known tokens of all waiting sequences (SGLang's #pending-token, without the chunk in
        progress)."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def __getitem__(self, seq_id: int) -> Sequence:
        return self._by_id[seq_id]

    def reserve(self, seq: Sequence) -> None:
        """Give the sequence the last place in the order of arrival."""
        self._num_places += 1
        seq.place = self._num_places

    def append(self, seq: Sequence) -> None:
        self.reserve(seq)
        self.insert(seq)

    def insert(self, seq: Sequence) -> None:
        """Put the sequence in its place. O(sequences behind it)."""
        behind = list(
            takewhile(lambda other: other.place > seq.place, reversed(self._by_id.values()))
        )
        seq.status = Status.WAITING
        self._by_id[seq.seq_id] = seq
        for other in reversed(behind):
            self._by_id[other.seq_id] = self._by_id.pop(other.seq_id)
        self.num_tokens += seq.num_known

    def remove(self, seq: Sequence) -> None:
        del self._by_id[seq.seq_id]
        self.num_tokens -= seq.num_known
