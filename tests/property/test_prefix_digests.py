"""Digests tell prefixes apart, and nothing else does."""

from __future__ import annotations

import itertools
import random
from hashlib import sha256

import pytest

from setpoint.core.prefix_digest import (
    DIGEST_BYTES,
    NAME_BYTES,
    grown,
    names_of,
    prompt_digest,
    split,
)
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.scheduler.sequence import Sequence

VOCAB = 2


def test_digests_are_equal_exactly_for_equal_prefixes() -> None:
    """All prompts of up to seven tokens, in two namespaces and in blocks of one to three tokens."""
    prompts = [ids for num in range(8) for ids in itertools.product(range(VOCAB), repeat=num)]
    for block in (1, 2, 3):
        prefixes: dict[bytes, tuple[object, ...]] = {}
        for namespace, ids in itertools.product(("", "other"), prompts):
            digests = split(grown(b"", pack_ids(ids), namespace, block=block))
            assert len(digests) == len(ids) // block
            for end, digest in enumerate(digests, 1):
                prefix = namespace, ids[: end * block]
                assert prefixes.setdefault(digest, prefix) == prefix
                assert len(digest) == DIGEST_BYTES
        assert len(prefixes) == 2 * sum(VOCAB**num for num in range(block, 8, block))


def test_whole_prompts_have_digests_of_their_own() -> None:
    found = {}
    for namespace, num in itertools.product(("", "other"), (1, 2, 63, 64, 65, 127, 128, 129)):
        for last in range(VOCAB):
            ids = pack_ids([0] * (num - 1) + [last])
            found[prompt_digest(ids, namespace)] = namespace, num, last
            assert prompt_digest(ids, namespace, grown(b"", ids, namespace)) in found
    assert len(found) == 2 * 8 * VOCAB


@pytest.mark.parametrize("block", [1, 3, 64])
def test_a_chain_that_grows_is_the_chain_of_the_whole(block: int) -> None:
    rng = random.Random(block)
    for _ in range(50):
        ids = pack_ids([rng.randrange(VOCAB) for _ in range(rng.randrange(5 * block + 3))])
        namespace, digests, end = rng.choice(["", "other"]), b"", 0
        while end < len(ids):
            end += 4 * rng.randrange(1, 2 * block + 2)
            digests = grown(digests, ids[:end], namespace, block=block)
        assert digests == grown(b"", ids, namespace, block=block)


def test_the_order_of_blocks_matters() -> None:
    one, other = [0] * 64, [1] * 64
    forth, back = (grown(b"", pack_ids(ids), "") for ids in (one + other, other + one))
    assert not {*split(forth)} & {*split(back)}
    assert names_of(forth) == [each[:NAME_BYTES] for each in split(forth)]


def test_a_prompt_without_a_namespace_has_the_chain_of_sglang() -> None:
    ids = pack_ids(range(128))
    first = sha256(ids[:256]).digest()
    assert grown(b"", ids, "") == first + sha256(first + ids[256:]).digest()


def request_of(num_tokens: int, num_prior: int = 0) -> Request:
    return Request(
        rid="r",
        prompt_ids=pack_ids([0] * num_tokens),
        sampling=SamplingParams(),
        seed=0,
        prior_output_ids=pack_ids([1] * num_prior),
    )


@pytest.mark.parametrize("is_carried", [False, True])
def test_a_sequence_hashes_each_block_once(
    is_carried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs included, and none of the blocks whose digests come with the request."""
    request = request_of(130, num_prior=70)
    if is_carried:
        request = request.with_digests()
        assert request.with_digests() is request
    seq = Sequence(0, request, request.prompt(), 100, frozenset())
    seq.outputs.frombytes(request.prior_output_ids)
    num_hashed = 0

    def counted(data: bytes) -> object:
        nonlocal num_hashed
        num_hashed += 1
        return sha256(data)

    monkeypatch.setattr("setpoint.core.prefix_digest.sha256", counted)
    for num_tokens in (64, 130, 200, 64):
        assert len(seq.digests(num_tokens)) == num_tokens // 64 * DIGEST_BYTES
    assert num_hashed == (0 if is_carried else 3)
    seq.outputs.extend([1] * 56)
    assert seq.digests(256) == grown(b"", pack_ids(seq.known_ids()), "")
    assert num_hashed == (1 if is_carried else 4) + 4
