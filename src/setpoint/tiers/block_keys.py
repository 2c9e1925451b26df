"""The names of blocks. A block is the keys and values of a fixed number of consecutive tokens; its
name is a digest of everything on which their bits depend: the engine that computes them, and the
digest of its prefix. So a block is written once, and read by any engine that would compute the
same bits."""

from __future__ import annotations

from hashlib import blake2b

from setpoint.core.prefix_digest import split

KEY_BYTES = 32


def block_keys(identity: bytes, digests: bytes) -> list[bytes]:
    """The names of blocks with these prefix digests, KEY_BYTES each. identity: the engine's
    (``core.identity``)."""
    return [blake2b(identity + each, digest_size=KEY_BYTES).digest() for each in split(digests)]
