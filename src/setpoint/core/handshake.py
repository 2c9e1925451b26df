"""A handshake in which two sides prove to each other that they know a secret, which never crosses
the connection. Ranks of one model use it, and servers that move keys and values.

    listener ── challenge L ──────────────────────────▶ caller
    listener ◀── challenge C, proof(caller, C, L) ───── caller
    listener ── proof(listener, L, C) ────────────────▶ caller

The listener says nothing of itself before it has the caller's proof, and the caller does not act
upon anything before it has the listener's. Challenges are drawn for each connection, so no proof is
of use a second time; roles are named, so none can be sent back; each use has a key of its own,
so none is of use elsewhere, even where people give two uses the same secret.
"""

from __future__ import annotations

import hmac
import secrets

SIZE = 32
"""Bytes of keys, challenges and proofs."""


def new_bytes() -> bytes:
    """A key, or a challenge."""
    return secrets.token_bytes(SIZE)


def key_for(use: str, secret: str) -> bytes:
    """The key of a use, for all who have this secret."""
    return hmac.digest(secret.encode(), use.encode(), "sha256")


def proof(key: bytes, role: str, own: bytes, other: bytes) -> bytes:
    """Shows that the sender knows the key. role: the sender's. own, other: the challenges that the
    sender and its peer have drawn."""
    return hmac.digest(key, role.encode() + b"\0" + own + other, "sha256")


def is_proof(given: bytes, key: bytes, role: str, own: bytes, other: bytes) -> bool:
    """Whether the peer, of this role, has proved that it knows the key. own, other: as the peer
    calls them; a challenge of another size than SIZE proves nothing."""
    is_same = hmac.compare_digest(given, proof(key, role, own, other))
    return is_same and len(own) == len(other) == SIZE
