"""Rows that bring none or several tokens: what is committed, what is discarded, and what is taken
back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from setpoint.core.request import Ids, LogprobOptions
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.preparers import ScriptedPreparer
from setpoint_testing.scripted import hashed_token, reference

DEPTHS = pytest.mark.parametrize(("depth", "replan"), [(0, True), (1, True), (2, True), (2, False)])
PROMPT = [10, 11, 12, 13, 14]


def expected(num_new: int, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    return reference(np.array(PROMPT, np.int32), num_new, hashed_token(VOCAB), stop_ids)


def harness(*counts: int, **config: object) -> Harness:
    """Rows that may bring several tokens bring ``counts`` in turn, and then all they may."""
    script: Iterator[int] = iter(counts)
    return Harness(
        max_tokens_per_row=4,
        num_tokens=lambda most: most if most == 1 else min(next(script, most), most),
        **config,  # type: ignore[arg-type]
    )


def samples(h: Harness) -> list[list[int]]:
    return [plan.rows.samples.tolist() for plan in h.plans]


def test_tokens_of_a_row_are_one_event() -> None:
    h = harness(3, 0, 2)
    h.submit("a", PROMPT, max_new_tokens=10, logprobs=LogprobOptions())
    h.drain()
    outcome = h.outcomes["a"]
    assert outcome.ids == outcome.logprob_ids == expected(10)
    # The prompt brings 1, then 3, none, 2, 4.
    assert samples(h) == [[1], [4], [4], [4], [4]]
    assert outcome.num_events == 4
    assert [stats.num_sampled for stats in h.recorder.steps] == [1, 3, 0, 2, 4]


def test_a_prompt_may_bring_no_token() -> None:
    counts = iter([0, 0, 1])
    h = Harness(num_tokens=lambda most: next(counts, most))
    h.submit("a", PROMPT, max_new_tokens=3)
    h.turn()
    assert h.outcomes["a"].num_events == 0
    assert (h.sequence("a").num_scheduled, h.sequence("a").prefilled) == (4, True)
    h.drain()
    assert h.outcomes["a"].ids == expected(3)
    assert len(h.plans) == 5


@DEPTHS
def test_what_lies_behind_a_stop_is_discarded(depth: int, replan: bool) -> None:
    stop = expected(6)[5]
    assert expected(6).index(stop) == 5
    h = harness(depth=depth, replan_inflight=replan, eos_token_ids=frozenset({stop}))
    h.submit("a", PROMPT, max_new_tokens=60, logprobs=LogprobOptions())
    h.drain()  # 1 + 4, then four tokens of which the first is the stop
    assert h.outcomes["a"].ids == h.outcomes["a"].logprob_ids == expected(6)
    assert h.outcomes["a"].finish is not None
    assert h.outcomes["a"].finish.matched == stop
    assert 3 <= len(h.plans) <= 3 + depth


@DEPTHS
def test_no_row_may_bring_more_than_the_length_limit_leaves(depth: int, replan: bool) -> None:
    h = harness(depth=depth, replan_inflight=replan)
    h.submit("a", PROMPT, max_new_tokens=8)
    h.drain()
    assert samples(h) == [[1], [4], [3]]
    assert h.outcomes["a"].ids == expected(8)


def test_room_is_claimed_for_all_that_may_come_and_used_for_what_came() -> None:
    h = harness(0, 1, 4, num_pages=40, page_size=2)
    h.submit("a", PROMPT, max_new_tokens=20)
    h.turn()
    assert len(h.sequence("a").pages) == 3
    seen = []
    for _ in range(3):
        h.turn()
        seq = h.sequence("a")
        seen.append((seq.num_known, seq.num_scheduled, len(seq.pages)))
    # Pages for known - 1 + 4 positions were taken before each row, and stay.
    assert seen == [(6, 5, 5), (7, 6, 5), (11, 10, 5)]


def test_only_confirmed_tokens_stay_in_the_cache() -> None:
    h = harness(2, 1, 3, num_pages=200)
    h.submit("a", PROMPT, max_new_tokens=7)
    h.drain()
    outputs = h.outcomes["a"].ids
    h.submit("b", [*PROMPT, *outputs, 1, 2, 3], max_new_tokens=1)
    h.drain()
    assert h.outcomes["b"].num_cached == len(PROMPT) + len(outputs) - 1


def test_nobody_is_retracted_to_make_room_for_guesses() -> None:
    h = harness(*[1] * 100, num_pages=30, max_req_input_len=20)
    for number in range(2):
        h.submit(f"r{number}", [20 + number, *PROMPT], max_new_tokens=8)
    h.drain()
    assert not h.recorder.retractions
    assert {count for counts in samples(h) for count in counts} == {1, 2, 3, 4}


@DEPTHS
def test_retraction_finds_the_pipeline_quiet(depth: int, replan: bool) -> None:
    h = harness(
        *[0, 3, 1, 2] * 20,
        num_pages=60,
        depth=depth,
        replan_inflight=replan,
        conservativeness=0.01,
    )
    for number in range(4):
        h.submit(f"r{number}", [*PROMPT, number], max_new_tokens=30)
        h.turn()
    h.drain()
    assert h.recorder.retractions
    for number in range(4):
        wanted = reference(np.array([*PROMPT, number], np.int32), 30, hashed_token(VOCAB))
        assert h.outcomes[f"r{number}"].ids == wanted


def test_the_interval_of_events_counts_tokens() -> None:
    h = harness(4, 2, 1, 3, stream_interval=3)
    h.submit("a", PROMPT, max_new_tokens=11)
    h.drain()
    assert h.outcomes["a"].ids == expected(11)
    assert h.outcomes["a"].num_events == 4  # after 1, 5, 8 and 11 tokens


class Even:
    """Allows even tokens only, and is content with five."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def fill_mask(self, words: Ids) -> None:
        allowed = np.zeros(len(words) * 32, np.uint8)
        allowed[:VOCAB:2] = 1
        words[:] = np.packbits(allowed, bitorder="little").view(np.int32)

    @property
    def terminated(self) -> bool:
        return len(self.accepted) == 5


@DEPTHS
def test_a_row_under_a_grammar_brings_one_token(depth: int, replan: bool) -> None:
    grammar = Even()
    h = Harness(
        max_tokens_per_row=4,
        depth=depth,
        replan_inflight=replan,
        preparer=ScriptedPreparer(
            lambda request: grammar, needs=lambda request: request.rid == "g"
        ),
    )
    h.submit("g", PROMPT, max_new_tokens=30)
    h.submit("free", PROMPT, max_new_tokens=9)
    h.drain()
    assert h.outcomes["g"].ids == grammar.accepted
    assert len(grammar.accepted) == 5
    assert h.outcomes["free"].ids == expected(9)
