"""What two servers must have in common so that one can use the other's keys and values."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(max_length=512)]
Size = Annotated[int, Meta(ge=0, le=1 << 40)]


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the bytes of a page depend on, besides its tokens."""

    architecture: Name
    weights: Name
    """Digest of the weights."""
    weight_version: Name
    settings: Name
    """Digest of what else changes a layer's result, such as the scaling of positions."""
    dtype: Name
    page_size: Size
    page_bytes: Size
    """Bytes of one page of one group."""
    parts: Name
    """What a layer keeps of a token, in words."""
    groups: Name
    """Which layers share a page, in words."""
    tp_size: Size

    def differences(self, other: Identity) -> list[str]:
        """What differs, in words; ``other`` is the peer's."""
        return [
            f"{field}: {getattr(self, field)!r} here, {getattr(other, field)!r} there"
            for field in self.__struct_fields__
            if getattr(self, field) != getattr(other, field)
        ]
