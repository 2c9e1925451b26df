"""Who hears what the engines' caches hold, on behalf of programs outside."""

from __future__ import annotations

from typing import Protocol


class BlockSink(Protocol):
    """Hears of each change, in order."""

    num_published: int
    """Messages that it has passed on."""
    num_overruns: int
    """How often a program outside fell so far behind that it missed some."""

    def take(self, rank: int, events: bytes) -> None:
        """The cache of this rank's engine has changed (see ``Blocks``)."""
        ...

    def cleared(self, rank: int) -> None:
        """The engine of this rank has ended."""
        ...
