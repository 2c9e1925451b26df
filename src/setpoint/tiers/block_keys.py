"""The names of blocks. A block is the keys and values of a fixed number of consecutive tokens; its
name is a digest of everything on which their bits depend: the engine that computes them, the
namespace, and every token up to the block's end. So a block is written once, and read by any engine
that would compute the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

import msgspec

from setpoint.core.request import Ids, pack_ids

KEY_BYTES = 32
FORMAT = "setpoint blocks 1"
"""Changes with the layout of a block's bytes or with this derivation."""


def identity_of(facts: Mapping[str, str]) -> bytes:
    """The digest of an engine. facts: name -> value, for all that decides which bits it computes
    and in which layout."""
    return sha256(msgspec.json.encode([FORMAT, sorted(facts.items())])).digest()


def block_keys(identity: bytes, namespace: str, ids: Ids, block: int) -> list[bytes]:
    """The names of the whole blocks of ``block`` tokens in ``ids``, KEY_BYTES each."""
    name = sha256(identity + b"\0" + namespace.encode(errors="surrogatepass")).digest()
    found, data, stride = [], pack_ids(ids), 4 * block
    for at in range(0, len(ids) // block * stride, stride):
        name = sha256(name + data[at : at + stride]).digest()
        found.append(name)
    return found
