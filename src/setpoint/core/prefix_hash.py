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


def prefix_hashes(
    ids: bytes,
    namespace: str,
    *,
    start: int = 0,
    block: int = BLOCK_TOKENS,
    size: int = HASH_BYTES,
) -> list[bytes]:
    """The hashes, of ``size`` bytes, of the prefixes of packed ``ids`` whose number of tokens is a
    multiple of ``block`` and more than ``start``, shortest first."""
    hasher = blake2b(namespace.encode(errors="surrogatepass"), digest_size=size)
    hasher.update(b"\0")
    data, found, stride = memoryview(ids), [], 4 * block
    for end in range(stride, len(ids) + 1, stride):
        hasher.update(data[end - stride : end])
        if end > 4 * start:
            found.append(hasher.copy().digest())
    return found
