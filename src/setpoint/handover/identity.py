"""What two servers must have in common so that one can use the other's keys and values."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(max_length=128)]
Value = Annotated[str, Meta(max_length=8192)]
SHOWN = 120
"""Characters of a value that a difference shows."""


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that the bytes of a page depend on, besides its tokens."""

    facts: Annotated[dict[Name, Value], Meta(max_length=256)]
    """Name -> value, both for people to read."""

    def differences(self, other: Identity) -> list[str]:
        """What differs, in words; ``other`` is the peer's."""
        names = sorted(self.facts.keys() | other.facts.keys())
        pairs = [(name, self.facts.get(name, "-"), other.facts.get(name, "-")) for name in names]
        return [
            f"{name}: {here[:SHOWN]!r} here, {there[:SHOWN]!r} there"
            for name, here, there in pairs
            if here != there
        ]
