"""The protocol of an object that gets every change of the engines' caches, to pass it on to other
programs."""

from __future__ import annotations

from typing import Protocol


class BlockSink(Protocol):
    """Gets each change, in order."""

    num_published: int
    """Number of messages that it has passed on."""
    num_overruns: int
    """How often a program fell so far behind that it missed messages."""

    def take(self, rank: int, events: bytes) -> None:
        """Pass on a change of the cache of this rank's engine (see ``Blocks``)."""
        ...

    def cleared(self, rank: int) -> None:
        """Pass on that the engine of this rank has ended."""
        ...
