"""A store of blocks in another program: a server, a file system of others, a library.

What these have in common is here, once: the header and the checksums (``block_format``), a time
limit on every call, and errors in words. What differs is a ``Client``: a few methods around a
library (``tiers.clients``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from setpoint.tiers.block_format import HEADER_BYTES, OWNER_BYTES, framed, read_header, unframed
from setpoint.tiers.store import Bytes, StoreCounts, StoreError, logger

Result = TypeVar("Result")
CALL_S = 5.0
"""How long a call may take; a client whose library has limits of its own gets this one, too."""


class Client(Protocol):
    """Values by name in another program. Threads may call every method at the same time. Methods
    raise what their library raises. A call that takes too long is given up, and its thread goes on:
    what a method was given belongs to it."""

    place: str
    """Where the values are, for people; without passwords."""

    def check(self) -> None:
        """Ask the other program something. Raises StoreError for what whoever started this server
        has to mend, anything else if the program does not answer now."""

    def num_leading(self, names: Sequence[str]) -> int:
        """How many of these values there are before the first one that there is not."""
        ...

    def get(self, name: str) -> bytes | memoryview | None:
        """The value; None if it is not there."""
        ...

    def head(self, name: str, size: int) -> bytes | None:
        """The first bytes of a value."""
        ...

    def put(self, name: str, value: bytes) -> bool:
        """Keep a value. False if there is no room."""
        ...

    def remove(self, name: str) -> None:
        """Remove a value, if it is there."""

    def names(self) -> Iterable[tuple[str, int]] | None:
        """(name, number of bytes) of all values; None if there is no list."""
        ...

    def close(self) -> None: ...


class RemoteStore:
    """See the module. Implements ``Store``."""

    def __init__(
        self,
        client: Client,
        owner: bytes,
        *,
        limit_s: float = CALL_S,
    ) -> None:
        """owner: names the engine, for ``clear``. Raises StoreError if the client cannot be
        used."""
        self.counts = StoreCounts()
        self.place = client.place
        self._client, self._owner, self._limit_s = client, owner[:OWNER_BYTES], limit_s
        self._lock = threading.Lock()
        """Guards the next two."""
        self._known: dict[str, int] = {}
        """Name -> bytes of the blocks that this process has put."""
        self._num_bytes = 0
        try:
            within(limit_s, client.check)
        except StoreError:
            raise
        except Exception as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else _first_line(error)
            logger.warning("The cache in %s cannot be reached now: %s.", self.place, why)

    def sweep(self) -> None:
        """There is nothing to do."""

    def num_leading(self, keys: Sequence[bytes]) -> int:
        names = [key.hex() for key in keys]
        return self._call(lambda: self._client.num_leading(names))

    def get(self, key: bytes) -> Bytes | None:
        name = key.hex()
        value = self._call(lambda: self._client.get(name))
        if value is None:
            return None
        data = unframed(key, value)
        if data is None:
            self.counts.damaged += 1
            logger.warning(
                "The cached block %s in %s is damaged; it is not used.", name, self.place
            )
            with suppress(StoreError):
                self._remove(name)
            return None
        return data

    def put(self, key: bytes, data: Bytes) -> int:
        name, value = key.hex(), framed(key, self._owner, data)
        if self._call(lambda: self._client.num_leading([name])):
            return 0
        if not self._call(lambda: self._client.put(name, value)):
            self.counts.refused += 1
            return 0
        with self._lock:
            self._num_bytes += len(value) - self._known.pop(name, 0)
            self._known[name] = len(value)
        return len(value)

    def clear(self) -> int:
        """Blocks of this engine; those alone that this process has put, if the client cannot list
        values."""
        listed = self._call(self._listed)
        if listed is None:
            with self._lock:
                mine = list(self._known)
        else:
            mine = [name for name, _ in listed if self._is_mine(name)]
        for name in mine:
            self._remove(name)
        return len(mine)

    def size(self) -> tuple[int, int]:
        """Number and bytes of the blocks that this process knows: asking the server would make the
        caller wait."""
        with self._lock:
            return len(self._known), self._num_bytes

    def close(self) -> None:
        self._call(self._client.close)

    # ------------------------------------------------------------------ the rest

    def _listed(self) -> list[tuple[str, int]] | None:
        found = self._client.names()
        return None if found is None else list(found)

    def _is_mine(self, name: str) -> bool:
        head = self._call(lambda: self._client.head(name, HEADER_BYTES))
        header = None if head is None else read_header(head)
        return header is not None and header.owner == self._owner

    def _remove(self, name: str) -> None:
        self._call(lambda: self._client.remove(name))
        with self._lock:
            self._num_bytes -= self._known.pop(name, 0)

    def _call(self, act: Callable[[], Result]) -> Result:
        """What ``act`` returns. Raises StoreError if it raises, or takes too long."""
        try:
            return within(self._limit_s, act)
        except StoreError:
            raise
        except TimeoutError:
            raise StoreError(f"{self.place} did not answer within {self._limit_s:g} s.") from None
        except Exception as error:
            raise StoreError(f"{self.place}: {_first_line(error)}.") from error


def within(limit_s: float, act: Callable[[], Result]) -> Result:
    """Call ``act`` in a thread of its own, and return or raise what it does. Raises TimeoutError
    after limit_s; the thread then goes on alone."""
    answer: SimpleQueue[tuple[bool, object]] = SimpleQueue()

    def work() -> None:
        try:
            answer.put((True, act()))
        except BaseException as error:
            answer.put((False, error))

    threading.Thread(target=work, name="cache-call", daemon=True).start()
    try:
        succeeded, found = answer.get(timeout=limit_s)
    except Empty:
        raise TimeoutError from None
    if not succeeded:
        assert isinstance(found, BaseException)
        raise found
    return found  # type: ignore[return-value]


def _first_line(error: Exception) -> str:
    """An error in one line: some libraries print a page."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
