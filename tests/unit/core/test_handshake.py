"""A proof holds for one key, one role and one connection."""

from __future__ import annotations

import itertools

from setpoint.core.handshake import SIZE, is_proof, key_for, new_bytes, proof


def test_only_the_proof_of_this_connection_and_role_counts() -> None:
    keys = [key_for(use, secret) for use in ("ranks", "transfers") for secret in ("one", "two", "")]
    assert len(set(keys)) == 6
    own, other = new_bytes(), new_bytes()
    sent = [keys[0], "rank", own, other]
    given = proof(keys[0], "rank", own, other)
    assert len(given) == SIZE
    for key, role, first, second in itertools.product(
        keys, ("rank", "node 0"), (own, other, new_bytes()), (own, other, new_bytes())
    ):
        assert is_proof(given, key, role, first, second) == ([key, role, first, second] == sent)


def test_challenges_of_another_size_prove_nothing() -> None:
    """Otherwise the same bytes could be cut into two challenges in several ways."""
    key, data = new_bytes(), new_bytes() + new_bytes()
    for cut in (0, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE):
        given = proof(key, "rank", data[:cut], data[cut:])
        assert is_proof(given, key, "rank", data[:cut], data[cut:]) == (cut == SIZE)
    assert not is_proof(b"", key, "rank", data[:SIZE], data[SIZE:])
