"""A failed allocation of a device's memory, in numbers and words."""

from __future__ import annotations

import math

import msgspec

MIB = 1 << 20


class Lack(msgspec.Struct, frozen=True):
    """An allocation for which a device had too little memory."""

    why: str
    """What the allocator said, without its advice."""
    wanted_bytes: int = 0
    """What it was asked for; 0: it did not say."""
    total_bytes: int = 0
    """Memory of the device; 0: unknown."""

    @property
    def less_static(self) -> str:
        """How much smaller ``--mem-fraction-static`` must be to leave room for the allocation:
        "0.03 (2048 MiB)", or a guess if the sizes are unknown."""
        if not self.wanted_bytes or not self.total_bytes:
            return "0.05"
        share = math.ceil(100 * self.wanted_bytes / self.total_bytes) / 100
        return f"{share:g} ({math.ceil(self.wanted_bytes / MIB)} MiB)"
