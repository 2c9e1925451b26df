"""Names for the beginnings of prompts, by which a frontend knows what its engines' caches hold.

A prefix of BLOCK_TOKENS tokens, or of a multiple of that, has a hash of all its tokens and of its
namespace. Two processes compute the same hash. Only the choice of an engine depends on it, so a
collision costs time and changes no token. So does a page size that does not divide BLOCK_TOKENS:
two pages may then begin with one block, which counts as evicted with the first of them.
"""

from __future__ import annotations

from hashlib import blake2b

BLOCK_TOKENS = 64
HASH_BYTES = 8
_BLOCK_BYTES = 4 * BLOCK_TOKENS


def prefix_hashes(ids: bytes, namespace: str, *, start: int = 0) -> list[bytes]:
    """The hashes of the prefixes of packed ``ids`` whose number of tokens is a multiple of
    BLOCK_TOKENS and more than ``start``, shortest first."""
    hasher = blake2b(namespace.encode(errors="surrogatepass"), digest_size=HASH_BYTES)
    hasher.update(b"\0")
    data, found = memoryview(ids), []
    for end in range(_BLOCK_BYTES, len(ids) + 1, _BLOCK_BYTES):
        hasher.update(data[end - _BLOCK_BYTES : end])
        if end > 4 * start:
            found.append(hasher.copy().digest())
    return found
