"""The identity of a prefix: one digest for each whole block of its tokens, chained, so that the
digest of a block stands for the block, for every token before it and for the namespace.

    first ──▶ sha256(first + block 0) ──▶ sha256(digest 0 + block 1) ──▶ …

Equal prefixes have equal digests in every process, so whoever has the digests needs no tokens to
compare prefixes. The frontend's choice of an engine, the cache tiers, the handover of prompts and
KV events all use this chain, over blocks of their size; for a namespace-free prompt it equals that
of SGLang's KV events.

What a collision costs: a digest names the keys and values that a request reads, which another
client may have paid for or written into a shared store. Two prefixes with one digest would answer
one client from the other's prompt, so the digest is cryptographic and has its full length. The
choice of an engine needs less: a collision among its names, the first NAME_BYTES of digests, costs
time and changes no token. So does a page size that does not divide BLOCK_TOKENS: two pages may
then begin with one block, which counts as evicted with the first of them.
"""

from __future__ import annotations

from hashlib import sha256

BLOCK_TOKENS = 64
"""Tokens of a block where nothing else decides it. Digests of such blocks are carried with a
request (``core.request.Request.digests``)."""
DIGEST_BYTES = 32
NAME_BYTES = 8
TOKEN_BYTES = 4


def first_digest(namespace: str) -> bytes:
    """The value before a prompt's first block. Whatever else keys and values depend on, besides
    tokens and the engine, has to enter here."""
    if not namespace:
        return b""
    return sha256(b"setpoint-namespace\0" + namespace.encode(errors="surrogatepass")).digest()


def chained(before: bytes, data: bytes | memoryview, block: int) -> bytes:
    """The digests, one after the other, of the whole blocks of ``block`` tokens in packed tokens
    that follow ``before``."""
    found, stride = [], TOKEN_BYTES * block
    for end in range(stride, len(data) + 1, stride):
        before = sha256(before + data[end - stride : end]).digest()
        found.append(before)
    return b"".join(found)


def grown(digests: bytes, ids: bytes, namespace: str, *, block: int = BLOCK_TOKENS) -> bytes:
    """The digests of the whole blocks of packed ``ids``. digests: those of their first blocks,
    which are not hashed again."""
    done = len(digests) // DIGEST_BYTES * block * TOKEN_BYTES
    if len(ids) - done < block * TOKEN_BYTES:
        return digests
    before = digests[-DIGEST_BYTES:] or first_digest(namespace)
    return digests + chained(before, memoryview(ids)[done:], block)


def split(digests: bytes) -> list[bytes]:
    """The digest of each block."""
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def names_of(digests: bytes) -> list[bytes]:
    """Short names of the prefixes that end with these blocks, NAME_BYTES each."""
    return [digests[at : at + NAME_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def prompt_digest(ids: bytes, namespace: str, digests: bytes = b"") -> bytes:
    """Tells two whole prompts apart, DIGEST_BYTES: the last digest and the tokens after it.
    digests: of the first blocks of packed ``ids``, as far as they are known."""
    digests = grown(digests, ids, namespace)
    rest = ids[len(digests) // DIGEST_BYTES * BLOCK_TOKENS * TOKEN_BYTES :]
    before = digests[-DIGEST_BYTES:] or first_digest(namespace)
    return sha256(len(ids).to_bytes(8, "little") + before + rest).digest()
