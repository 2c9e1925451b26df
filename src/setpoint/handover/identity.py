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


def differences(prefill: Identity, decode: Identity) -> list[str]:
    """What differs between two servers, in words that are the same on both."""
    names = sorted(prefill.facts.keys() | decode.facts.keys())
    pairs = [(name, prefill.facts.get(name, ""), decode.facts.get(name, "")) for name in names]
    return [
        f"{_shown(name)} is {_shown(one)} on the prefill server and {_shown(other)} on the decode"
        " server"
        for name, one, other in pairs
        if one != other
    ]


def _shown(text: str) -> str:
    text = text[:SHOWN]
    return text if text and text.isprintable() else repr(text)
