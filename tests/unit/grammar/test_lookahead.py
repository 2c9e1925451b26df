"""Forced tokens: which there are, when they are known, and how rows bring them. That they change no
output is shown in ``tests/property/test_forced_tokens.py``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_cases import BACKENDS, ENDS, factory

from setpoint.core.errors import RequestError
from setpoint.core.grammar import Grammar
from setpoint.core.messages import Finish
from setpoint.core.request import SAMPLING_MASK, Ids, LogprobOptions
from setpoint.grammar.lookahead import Lookahead, only_token
from setpoint.scheduler.sequence import MAX_FORCED
from setpoint_testing.byte_tokenizer import VOCAB_SIZE
from setpoint_testing.constrained import Patient, read_schemas, request_under
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.preparers import ScriptedPreparer

SCHEMAS = read_schemas(Path(__file__).parents[2] / "schemas")
EOS = 1
PROMPT = [3, 4, 5]
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


class Script:
    """Allows these tokens, place by place, and nothing after them."""

    def __init__(self, *places: Sequence[int]) -> None:
        self._places = places
        self._at = 0
        self.num_masks = 0

    def accept(self, token: int) -> None:
        assert token in self._places[self._at]
        self._at += 1

    def fill_mask(self, words: Ids) -> None:
        self.num_masks += 1
        for token in self._places[self._at]:
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    @property
    def terminated(self) -> bool:
        return self._at == len(self._places)


def allowed(grammar: Grammar, num_forced: int = 0, vocab_size: int = VOCAB) -> list[int]:
    words = np.zeros(-(-vocab_size // 32), np.int32)
    grammar.fill_mask(words, num_forced)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return list(map(int, np.flatnonzero(bits)))


@pytest.mark.parametrize(
    ("tokens", "only"),
    [([], None), ([0], 0), ([31], 31), ([95], 95), ([64], 64), ([3, 31], None), ([3, 40], None)],
)
def test_a_mask_of_one_token(tokens: list[int], only: int | None) -> None:
    words = np.zeros(3, np.int32)
    Script(tokens).fill_mask(words)
    assert only_token(words) == only


def test_each_mask_is_made_once() -> None:
    script = Script([5], [31], [7, 8], [9], [10])
    grammar = Lookahead(script, VOCAB)
    assert grammar.forced(1) == [5]
    assert grammar.forced(15) == [5, 31]
    assert [allowed(grammar, place) for place in range(3)] == [[5], [31], [7, 8]]
    for token in (5, 31, 7):
        grammar.accept(token)
    # The last token is forced too, but there is no mask after it.
    assert grammar.forced(15) == [9]
    assert [allowed(grammar, place) for place in range(2)] == [[9], [10]]
    grammar.accept(9)
    assert not grammar.terminated
    grammar.accept(10)
    assert grammar.terminated
    assert script.num_masks == 5


class Broken(Script):
    """Raises after three tokens, at one place or the other."""

    def __init__(self, where: str) -> None:
        super().__init__([5], [6], [7], [8], [9])
        self._where = where

    def accept(self, token: int) -> None:
        if self._where == "accept" and self._at == 3:
            raise RequestError("too hard")
        super().accept(token)

    def fill_mask(self, words: Ids) -> None:
        if self._where == "fill_mask" and self._at == 3:
            raise RequestError("too hard")
        super().fill_mask(words)


def test_what_is_raised_ahead_is_raised_when_it_is_due() -> None:
    for where in ("accept", "fill_mask"):
        grammar = Lookahead(Broken(where), VOCAB)
        assert grammar.forced(15) == [5, 6, 7]
        for token in (5, 6, 7):
            grammar.accept(token)
        assert grammar.forced(15) == []
        if where == "accept":
            assert allowed(grammar) == [8]
        with pytest.raises(RequestError, match="too hard"):
            grammar.accept(8) if where == "accept" else allowed(grammar)


WANTED: dict[str, Any] = {
    "logprobs": LogprobOptions(),
    "hidden_states": True,
    "token_facts": (SAMPLING_MASK,),
}
"""What a client may ask for besides tokens, that each token has a step of its own for."""


def run(*places: Sequence[int], jumps: bool = True, **options: Any) -> Harness:
    sampling = {
        name: options.pop(name)
        for name in ("max_new_tokens", "stop_token_ids", *WANTED)
        if name in options
    }
    harness = Harness(
        preparer=ScriptedPreparer(lambda request: Script(*places), jumps=jumps),
        eos_token_ids=frozenset({EOS}),
        strict_accounting=True,
        **options,
    )
    harness.submit("g", PROMPT, **{"max_new_tokens": 60, **sampling})
    harness.drain()
    return harness


def samples(harness: Harness) -> list[int]:
    return [count for plan in harness.plans for count in plan.rows.samples.tolist()]


CHOICE = [30, 40, 50]
ONE = [[token] for token in range(60, 90)]


def test_a_row_brings_the_forced_tokens_and_one_more() -> None:
    harness = run(CHOICE, *ONE[:4], CHOICE, CHOICE, ONE[4], [8])
    assert samples(harness) == [1, 5, 1, 2]
    assert harness.outcomes["g"].finish == Finish("stop")
    assert [step.num_forced for step in harness.recorder.steps] == [0, 4, 0, 1]
    assert [step.num_sampled for step in harness.recorder.steps] == samples(harness)


def test_a_row_planned_ahead_leaves_one_forced_token_to_sample() -> None:
    """With a step in flight the first forced token is sampled by a row that was planned before."""
    harness = run(CHOICE, *ONE[:4], CHOICE, CHOICE, CHOICE, depth=1)
    assert samples(harness) == [1, 1, 4, 1, 1, 1]  # the last is planned before the end is known


@DEPTHS
def test_a_long_run_takes_several_rows(depth: int) -> None:
    harness = run(CHOICE, *ONE, depth=depth)
    assert max(samples(harness)) == 1 + MAX_FORCED - depth
    assert harness.outcomes["g"].ids[1:] == [token for (token,) in ONE]


@DEPTHS
@pytest.mark.parametrize("most", range(1, 8))
def test_the_length_limit_is_exact(depth: int, most: int) -> None:
    harness = run(CHOICE, *ONE[:10], depth=depth, max_new_tokens=most)
    assert harness.outcomes["g"].finish == Finish("length", length=most)
    assert len(harness.outcomes["g"].ids) == most


@pytest.mark.parametrize("wanted", WANTED)
def test_what_is_reported_for_each_token_has_each_token_sampled(wanted: str) -> None:
    harness = run(CHOICE, *ONE[:4], CHOICE, **{wanted: WANTED[wanted]})
    assert samples(harness) == [1] * 6


@DEPTHS
def test_a_stop_id_is_sampled(depth: int) -> None:
    harness = run(CHOICE, *ONE[:6], depth=depth, stop_token_ids=[63])
    assert harness.outcomes["g"].ids[1:] == [60, 61, 62, 63]
    assert harness.outcomes["g"].finish == Finish("stop", matched=63)


def test_nobody_is_retracted_to_make_room_for_forced_tokens() -> None:
    harness = Harness(
        num_pages=30,
        max_req_input_len=20,
        preparer=ScriptedPreparer(lambda request: Script(CHOICE, *ONE[:9])),
    )
    for number in range(2):
        harness.submit(f"g{number}", [number, *PROMPT], max_new_tokens=10)
        harness.turn()
    harness.drain()
    assert not harness.recorder.retractions
    assert [len(harness.outcomes[f"g{number}"].ids) for number in range(2)] == [10, 10]
    assert set(samples(harness)) == {1, 9}


def twins(schema: Any, seed: int, backend: str) -> int:
    """Walk a random way through two grammars of a schema, one of which looks ahead; returns the
    number of forced tokens."""
    request = request_under(json_schema=schema)
    try:
        plain, ahead = (Patient(factory(backend)(request)) for _ in range(2))
    except RequestError:
        return 0
    draw, forced, num_forced = random.Random(seed), list[int](), 0
    for _ in range(60):
        tokens = allowed(plain, vocab_size=VOCAB_SIZE)
        assert allowed(ahead, vocab_size=VOCAB_SIZE) == tokens
        if forced:
            assert tokens == [forced.pop(0)]
            num_forced += 1
        token = draw.choice([token for token in tokens if token not in ENDS] or tokens)
        for grammar in (plain, ahead):
            grammar.accept(token)
        assert plain.terminated == ahead.terminated
        if plain.terminated:
            break
        forced = list(ahead.forced(draw.randrange(1, 20)))
    return num_forced


def check_schemas(schemas: Sequence[Any], backend: str) -> None:
    found = sum(twins(schema, seed, backend) for seed, schema in enumerate(schemas))
    assert found > 2 * len(schemas)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forced_tokens_of_schemas_are_those_that_masks_leave(backend: str) -> None:
    check_schemas(list(SCHEMAS.values())[::10], backend)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_forced_tokens_of_all_schemas_are_those_that_masks_leave(backend: str) -> None:
    check_schemas(list(SCHEMAS.values()), backend)
