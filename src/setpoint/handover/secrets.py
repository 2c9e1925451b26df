"""Proofs that a peer was let in by the bootstrap server.

The prefill server's processes share a key. The bootstrap server makes a secret for each pair of
servers: it draws a number, the pair's name, and computes the secret from both, so that it need not
remember it. The key and the secrets never cross the connection that they protect.

With an API key, proofs need it too: whoever has only seen or asked for a pair's secret can prove
nothing, and the API key itself is sent nowhere.
"""

from __future__ import annotations

import hmac
import secrets

SIZE = 32
"""Bytes of keys, names, secrets, challenges and proofs."""


def new_bytes() -> bytes:
    """A key, the name of a pair, or a challenge."""
    return secrets.token_bytes(SIZE)


def secret_of(key: bytes, pair: bytes) -> bytes:
    """The secret of a pair."""
    return hmac.digest(key, b"pair" + pair, "sha256")


def with_api_key(secret: bytes, api_key: str | None) -> bytes:
    """What both servers of a pair prove that they know. api_key: the servers' own, if they have
    one."""
    if api_key is None:
        return secret
    return hmac.digest(api_key.encode(), b"api key" + secret, "sha256")


def proof(secret: bytes, role: str, own: bytes, other: bytes) -> bytes:
    """Shows that the sender knows the secret. role: the sender's, so that a proof cannot be sent
    back. own, other: the challenges that the sender and its peer have drawn."""
    return hmac.digest(secret, role.encode() + own + other, "sha256")


def is_proof(given: bytes, secret: bytes, role: str, own: bytes, other: bytes) -> bool:
    """Whether the peer, of this role, has proved that it knows the secret. own, other: as the peer
    calls them."""
    return hmac.compare_digest(given, proof(secret, role, own, other))
