"""The state of the KV pool, as records and control calls report it."""

from __future__ import annotations

import msgspec


class PoolStats(msgspec.Struct, frozen=True):
    """State of the page pool in pool tokens (``core.pagerows``), which are tokens if the model has
    one cache group. Invariant: free + evictable + locked + held == total."""

    total: int
    free: int
    evictable: int
    """Cached, and not locked by any sequence."""
    locked: int
    """Stored in the prefix tree, on a path that some sequence holds."""
    held: int
    """Owned by sequences, outside the prefix tree."""

    @property
    def used(self) -> int:
        """Tokens that eviction cannot make free (SGLang's "#token")."""
        return self.total - self.free - self.evictable

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return self.used / self.total if self.total else 0.0
