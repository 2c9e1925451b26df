"""How the run writes records: into the journal in the order of completion, or in the order of the
input."""

from __future__ import annotations

from typing import Protocol

from setpoint.batch.entry import BatchError
from setpoint.batch.journal import Journal


class Output(Protocol):
    @property
    def held_bytes(self) -> int:
        """Bytes of records that cannot be written yet."""
        ...

    def expect(self, number: int) -> None:
        """Announce that this request begins; called in the order of the input."""
        ...

    def put(self, number: int, record: bytes) -> None:
        """Write the request's record, now or later. Raises BatchError if it cannot be written."""
        ...


class AsTheyCome:
    held_bytes = 0

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def expect(self, number: int) -> None:
        pass

    def put(self, number: int, record: bytes) -> None:
        self._journal.append(record)


class InOrder:
    """Holds a record back until the records of all requests before it are written."""

    def __init__(self, journal: Journal, *, after: int) -> None:
        """after: the last line that the journal already answers."""
        self._journal = journal
        self._after = after
        self._pending: dict[int, bytes | None] = {}
        """Requests whose records are not written yet, in order; None until the record arrives."""
        self.held_bytes = 0

    def expect(self, number: int) -> None:
        if number < self._after:
            raise BatchError(
                f"The output has a gap: it reaches line {self._after}, but line {number} is"
                " missing. Leave --keep-order out."
            )
        self._pending[number] = None

    def put(self, number: int, record: bytes) -> None:
        self._pending[number] = record
        self.held_bytes += len(record)
        while self._pending:
            first = next(iter(self._pending))
            ready = self._pending[first]
            if ready is None:
                return
            self._journal.append(ready)
            self.held_bytes -= len(ready)
            del self._pending[first]
