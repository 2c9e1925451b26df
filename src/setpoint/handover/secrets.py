"""Proofs that a peer knows the key of a transfer.

The key follows from that of the API, which both servers have. Servers without one must be on one
machine and belong to one user: the prefill server has left a key there (``announcements``). Keys
never cross the connection that they protect.
"""

from __future__ import annotations

import hmac
import secrets

SIZE = 32
"""Bytes of keys, challenges and proofs."""


def new_bytes() -> bytes:
    """A key, or a challenge."""
    return secrets.token_bytes(SIZE)


def key_of_api(api_key: str) -> bytes:
    """The key of transfers between servers that have this API key."""
    return hmac.digest(api_key.encode(), b"transfers", "sha256")


def proof(key: bytes, role: str, own: bytes, other: bytes) -> bytes:
    """Shows that the sender knows the key. role: the sender's, so that a proof cannot be sent back.
    own, other: the challenges that the sender and its peer have drawn."""
    return hmac.digest(key, role.encode() + own + other, "sha256")


def is_proof(given: bytes, key: bytes, role: str, own: bytes, other: bytes) -> bool:
    """Whether the peer, of this role, has proved that it knows the key. own, other: as the peer
    calls them."""
    return hmac.compare_digest(given, proof(key, role, own, other))
