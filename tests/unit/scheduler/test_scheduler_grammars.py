"""Grammars and everything else that moves a sequence: retraction, chunks, n > 1, the limits of
length, and grammars that fail. A scripted executor samples the smallest token that a mask allows."""

from __future__ import annotations

from typing import Any

import pytest

from setpoint.core.errors import RequestError
from setpoint.core.grammar import EndOfOutput, Grammar
from setpoint.core.messages import Finish
from setpoint.core.records import GrammarEnded, PreparationEnded
from setpoint.core.request import Ids, Request
from setpoint_testing.harness import Harness
from setpoint_testing.preparers import ScriptedPreparer

EOS = 1
PROMPT = [3, 4, 5, 6]
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


class Word:
    """Allows one sequence of tokens, and EOS at its end."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.accepted: list[int] = []

    def accept(self, token: int) -> None:
        if token not in self._next():
            raise RequestError(f"token {token} is not allowed")
        self.accepted.append(token)

    def fill_mask(self, words: Ids) -> None:
        for token in self._next():
            words[token // 32] |= 1 << token % 32

    def _next(self) -> list[int]:
        at = len(self.accepted)
        return [self.tokens[at]] if at < len(self.tokens) else [EOS]

    @property
    def terminated(self) -> bool:
        return len(self.accepted) >= len(self.tokens)


class Endable(Word):
    """A Word that allows EOS everywhere, and nothing else at its end."""

    def _next(self) -> list[int]:
        return [*dict.fromkeys((*super()._next(), EOS))]

    @property
    def terminated(self) -> bool:
        return False


def run(
    make: Any, *, count: int = 1, sampling: dict[str, Any] | None = None, **options: Any
) -> Harness:
    """Requests under a grammar, g0, …, beside as many free ones, f0, …"""
    harness = Harness(
        preparer=ScriptedPreparer(make, needs=lambda request: request.rid.startswith("g")),
        eos_token_ids=frozenset({EOS}),
        strict_accounting=True,
        **options,
    )
    for number in range(count):
        harness.submit(f"g{number}", PROMPT, **{"max_new_tokens": 12, **(sampling or {})})
        harness.submit(f"f{number}", [7, 8, number + 9], max_new_tokens=12, ignore_eos=True)
    harness.drain()
    return harness


def finish_of(harness: Harness, rid: str = "g0") -> Finish:
    finish = harness.outcomes[rid].finish
    assert finish is not None
    return finish


@DEPTHS
def test_the_grammar_ends_its_output_and_nobody_elses(depth: int) -> None:
    harness = run(lambda request: Word(9, 8, 7), depth=depth, count=3)
    alone = run(lambda request: Word(2), depth=depth, count=3)
    for number in range(3):
        assert harness.outcomes[f"g{number}"].ids == [9, 8, 7]
        assert finish_of(harness, f"g{number}") == Finish("stop")
        assert harness.outcomes[f"f{number}"].ids == alone.outcomes[f"f{number}"].ids
    assert [each.discards for each in harness.recorder.of(GrammarEnded)] == [False] * 3


@DEPTHS
@pytest.mark.parametrize(
    "options", [{"num_pages": 40}, {"chunked_prefill_size": 2}, {"page_size": 4}]
)
def test_retraction_and_chunks_change_nothing(depth: int, options: dict[str, Any]) -> None:
    word = tuple(range(10, 30))
    harness = run(
        lambda request: Word(*word),
        depth=depth,
        count=4,
        sampling={"max_new_tokens": 40},
        **options,
    )
    for number in range(4):
        assert harness.outcomes[f"g{number}"].ids == list(word)


@DEPTHS
def test_max_new_tokens_cuts_an_output_and_says_so(depth: int) -> None:
    harness = run(lambda request: Word(9, 8, 7), depth=depth, sampling={"max_new_tokens": 2})
    assert harness.outcomes["g0"].ids == [9, 8]
    assert finish_of(harness) == Finish("length", length=2)


@DEPTHS
def test_ignore_eos_leaves_the_end_to_the_grammar(depth: int) -> None:
    harness = run(lambda request: Word(9, 8), depth=depth, sampling={"ignore_eos": True})
    assert harness.outcomes["g0"].ids == [9, 8]
    assert finish_of(harness) == Finish("stop")


@DEPTHS
def test_min_new_tokens_keeps_an_output_from_ending_early(depth: int) -> None:
    harness = run(lambda request: Endable(9, 8, 7), depth=depth, sampling={"min_new_tokens": 3})
    assert harness.outcomes["g0"].ids[:3] == [9, 8, 7]


@DEPTHS
def test_min_new_tokens_yields_where_the_grammar_allows_only_the_end(depth: int) -> None:
    """The output is complete: it ends, too short, and no token is sampled in its place."""
    harness = run(lambda request: Endable(9), depth=depth, sampling={"min_new_tokens": 5})
    assert harness.outcomes["g0"].ids == [9]
    assert finish_of(harness) == Finish("stop")
    (ended,) = harness.recorder.of(GrammarEnded)
    assert ended.discards


@DEPTHS
def test_min_new_tokens_and_stop_ids_that_leave_no_token_are_an_error(depth: int) -> None:
    harness = run(
        lambda request: Word(9, 8, 7),
        depth=depth,
        sampling={"min_new_tokens": 5, "stop_token_ids": [8]},
    )
    assert harness.outcomes["g0"].ids == [9]
    finish = finish_of(harness)
    assert finish.status_code == 400
    assert finish.message is not None
    assert "min_new_tokens forbids every token" in finish.message


@DEPTHS
def test_a_stop_id_that_the_grammar_allows_ends_the_output(depth: int) -> None:
    harness = run(lambda request: Word(9, 8, 7), depth=depth, sampling={"stop_token_ids": [8]})
    assert harness.outcomes["g0"].ids == [9, 8]
    assert finish_of(harness) == Finish("stop", matched=8)


class Failing(Word):
    """Fails behind two tokens, in one of three ways."""

    def __init__(self, where: str, error: Exception | None) -> None:
        super().__init__(9, 8, 7, 6)
        self._where = where
        self._error = error

    def accept(self, token: int) -> None:
        if self._where == "accept" and len(self.accepted) == 2 and self._error is not None:
            raise self._error
        super().accept(token)

    def fill_mask(self, words: Ids) -> None:
        if self._where == "fill_mask" and len(self.accepted) == 2:
            if self._error is not None:
                raise self._error
            return
        super().fill_mask(words)


@DEPTHS
@pytest.mark.parametrize(
    ("where", "error", "status"),
    [
        ("accept", RequestError("too hard"), 400),
        ("fill_mask", RequestError("too hard"), 400),
        ("accept", ValueError("a bug"), 500),
        ("fill_mask", ValueError("a bug"), 500),
        ("fill_mask", None, 400),
        ("accept", EndOfOutput(Finish("stop")), None),
    ],
)
def test_a_grammar_that_fails_ends_its_own_request(
    depth: int, where: str, error: Exception | None, status: int | None
) -> None:
    harness = run(lambda request: Failing(where, error), depth=depth)
    assert harness.outcomes["g0"].ids == [9, 8]
    assert finish_of(harness).status_code == status
    assert finish_of(harness, "f0").type == "length"
    (ended,) = harness.recorder.of(GrammarEnded)
    assert ended.discards
    assert harness.cache.pool_stats().held == 0


def test_each_sample_of_a_prompt_has_its_own_grammar() -> None:
    made: list[Word] = []

    def make(request: Request) -> Grammar:
        made.append(Word(9, 8))
        return made[-1]

    harness = run(make, count=3)
    assert [word.accepted for word in made] == [[9, 8]] * 3
    assert [ended.outcome for ended in harness.recorder.of(PreparationEnded)] == ["compiled"] * 3


def refusing(request: Request) -> Grammar:
    raise RequestError("that is no schema")


def test_what_became_of_each_preparation_is_recorded() -> None:
    preparer = ScriptedPreparer(lambda request: Word(9), hold=True)
    harness = Harness(preparer=preparer, preparation_timeout_s=5.0)
    for rid in ("made", "aborted", "stopped", "late"):
        harness.submit(rid, PROMPT, regex="x")
    harness.turn()
    preparer.finish(harness.seq_id("made"))
    harness.abort("aborted")
    harness.stop("stopped")
    harness.turn()
    harness.clock.advance(6.0)
    harness.turn()
    harness.drain()
    outcomes = {each.rid: each.outcome for each in harness.recorder.of(PreparationEnded)}
    assert outcomes == {
        "made": "compiled",
        "aborted": "aborted",
        "stopped": "aborted",
        "late": "timed_out",
    }
    assert {each.kind for each in harness.recorder.of(PreparationEnded)} == {"regex"}
    refused = run(refusing)
    assert [each.outcome for each in refused.recorder.of(PreparationEnded)] == ["refused"]
