"""Decode memory, retraction, the new-token ratio, finish tests and emission
(docs/sglang/scheduling.md)."""

from __future__ import annotations

import numpy as np
import pytest

from setpoint.core.request import Ids
from setpoint.scheduler.conservativeness import NewTokenRatio
from setpoint.scheduler.retraction import RunningView, retraction_order
from setpoint.scheduler.scheduler_config import RatioConfig
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.scripted import hashed_token, reference

EAGER = 0.01
"""Conservativeness with which admission takes too many."""
"""Reserves almost nothing, so that the pool runs dry."""


def prompt(length: int, first: int = 10) -> list[int]:
    return [first, *((first * 7 + index) % VOCAB for index in range(length - 1))]


def counting(history: Ids) -> int:
    """Next token = number of tokens so far, so that tests can place a stop id exactly."""
    return len(history) % VOCAB


def test_new_token_ratio_follows_its_formula() -> None:
    ratio = NewTokenRatio(RatioConfig(), 1.0)
    assert ratio.current == pytest.approx(0.7)
    for _ in range(600):
        ratio.decay(1.0)
    assert ratio.current == pytest.approx(0.7 * 0.14)
    ratio.decay(1.0)
    assert ratio.current == pytest.approx(0.7 * 0.14)
    ratio.set_after_retraction(num_outputs=100, max_new_tokens=999, num_kept=5)
    assert ratio.current == pytest.approx(0.2)
    ratio.set_after_retraction(num_outputs=100, max_new_tokens=10, num_kept=5)
    assert ratio.current == 1.0
    ratio.reset(1.0)
    assert ratio.current == pytest.approx(0.7)
    assert NewTokenRatio(RatioConfig(), 0.3).current == pytest.approx(0.21)
    assert NewTokenRatio(RatioConfig(), 1.5).current == 1.0


def test_retraction_takes_fewest_outputs_then_longest_input_then_the_newest() -> None:
    views = [
        RunningView(0, 5, 10),
        RunningView(1, 2, 10),
        RunningView(2, 2, 30),
        RunningView(3, 9, 99),
        RunningView(4, 2, 10),
    ]
    assert retraction_order(views) == [2, 4, 1, 0, 3]


def test_a_dry_pool_retracts_and_everyone_still_gets_their_tokens() -> None:
    harness = Harness(num_pages=64, conservativeness=EAGER)
    for number in range(4):
        harness.submit(f"r{number}", prompt(6, 10 + number), max_new_tokens=30)
        harness.turn()
    harness.drain()
    assert harness.recorder.retractions
    for number in range(4):
        expected = reference(np.array(prompt(6, 10 + number), np.int32), 30, hashed_token(VOCAB))
        assert harness.outcomes[f"r{number}"].ids == expected
    assert sum(outcome.num_retractions for outcome in harness.outcomes.values()) == sum(
        r.num_seqs for r in harness.recorder.retractions
    )


def test_a_retracted_request_goes_to_the_end_of_the_queue() -> None:
    harness = Harness(num_pages=40, conservativeness=EAGER, max_running_requests=3)
    for number in range(5):
        harness.submit(f"r{number}", prompt(4, 10 + number), max_new_tokens=25)
        harness.turn()
    while not harness.recorder.retractions:
        harness.turn()
    assert harness.waiting() == ["r3", "r4", "r2"]


def test_the_ratio_after_a_retraction_is_that_of_the_kept() -> None:
    harness = Harness(num_pages=40, conservativeness=EAGER)
    harness.submit("a", prompt(5, 10), max_new_tokens=30)
    harness.turn(4)
    harness.submit("b", prompt(5, 20), max_new_tokens=24)
    for _ in range(40):
        harness.turn()
        if harness.recorder.retractions:
            break
    (event,) = harness.recorder.retractions
    assert harness.running() == ["a"]
    outputs = len(harness.sequence("a").outputs) - 1  # one more was sampled in the same turn
    assert event.ratio_after == pytest.approx(min(1, (outputs + 20) / 31))
    assert event.num_seqs == 1
    assert event.num_tokens_gained > 0


def test_the_sequence_in_mid_prefill_goes_before_the_last_decoding_one_is_aborted() -> None:
    harness = Harness(num_pages=40, chunked_prefill_size=4, conservativeness=EAGER)
    harness.submit("a", prompt(4, 10), max_new_tokens=30)
    harness.turn(22)
    harness.submit("long", prompt(30, 20), max_new_tokens=2)
    harness.drain()
    assert all(
        outcome.finish is not None and outcome.finish.type == "length"
        for outcome in harness.outcomes.values()
    )


def test_the_last_request_is_aborted_when_even_alone_it_does_not_fit() -> None:
    harness = Harness(num_pages=40)
    harness.submit("a", prompt(4), max_new_tokens=30)
    harness.turn(2)
    stolen = harness.cache.alloc(harness.cache.free_tokens)  # nobody will give these back
    assert stolen is not None
    harness.loop.step()
    harness._collect()
    finish = harness.outcomes["a"].finish
    assert finish is not None
    assert finish.status_code == 500
    assert (finish.message or "").startswith(
        "Out of memory even after retracting all other requests in the decode batch."
    )
    harness.cache.free(stolen)
    harness.submit("b", prompt(4), max_new_tokens=3)
    harness.drain()
    assert len(harness.outcomes["b"].ids) == 3, "the server goes on"


def test_page_size_decides_when_a_decode_step_needs_memory() -> None:
    harness = Harness(num_pages=8, page_size=4)
    harness.submit("a", prompt(4), max_new_tokens=10)
    harness.drain()
    grown = [len(plan.pages.pages) for plan in harness.plans]
    assert grown == [1, 1, 0, 0, 0, 1, 0, 0, 0, 1]


def test_forced_retraction_for_tests() -> None:
    harness = Harness(test_retract_interval=3)
    for number in range(3):
        harness.submit(f"r{number}", prompt(4, 10 + number), max_new_tokens=12)
    harness.drain()
    assert harness.recorder.retractions
    assert all(event.testing for event in harness.recorder.retractions)
    for number in range(3):
        assert harness.outcomes[f"r{number}"].ids == reference(
            np.array(prompt(4, 10 + number), np.int32), 12, hashed_token(VOCAB)
        )


@pytest.mark.parametrize("num_pages", [11, 14, 20])
def test_forced_retraction_takes_as_many_as_it_must(num_pages: int) -> None:
    """Retraction takes enough where requests run in step, and where the pool is so small that the
    pages of one victim do not give the others one each."""
    harness = Harness(
        num_pages=num_pages,
        page_size=4,
        test_retract_interval=1,
        clip_max_new_tokens=1,
        conservativeness=EAGER,
    )
    for number in range(8):
        harness.submit(f"r{number}", prompt(3, 10 + number), max_new_tokens=12)
    harness.drain()
    assert any(event.testing and event.num_seqs > 1 for event in harness.recorder.retractions)
    for number in range(8):
        assert harness.outcomes[f"r{number}"].ids == reference(
            np.array(prompt(3, 10 + number), np.int32), 12, hashed_token(VOCAB)
        )


@pytest.mark.parametrize(
    ("options", "length", "finish_type", "matched"),
    [
        ({"eos": {9}}, 5, "stop", 9),
        ({"eos": set(), "stop_token_ids": (7,)}, 3, "stop", 7),
        ({"eos": {9}, "ignore_eos": True, "stop_token_ids": (7,)}, 8, "length", None),
        ({"eos": {12}}, 8, "stop", 12),  # a stop at the limit is a stop
    ],
)
def test_finish_order(
    options: dict[str, object], length: int, finish_type: str, matched: int | None
) -> None:
    eos = options.pop("eos")
    harness = Harness(next_token=counting, eos_token_ids=frozenset(eos))  # type: ignore[arg-type]
    harness.submit("a", prompt(5), max_new_tokens=8, **options)
    harness.drain()
    outcome = harness.outcomes["a"]
    assert outcome.finish is not None
    assert (len(outcome.ids), outcome.finish.type, outcome.finish.matched) == (
        length,
        finish_type,
        matched,
    )


def test_logits_that_are_not_finite_abort_their_request_alone() -> None:
    def broken(history: Ids) -> int:
        return -1 if history[0] == 66 and len(history) > 5 else int(history.sum()) % VOCAB

    harness = Harness(next_token=broken)
    harness.submit("bad", [66, 1, 2, 3], max_new_tokens=9)
    harness.submit("good", [3, 1, 2, 3], max_new_tokens=9)
    harness.drain()
    finish = harness.outcomes["bad"].finish
    assert finish is not None
    assert (finish.type, finish.status_code, finish.message) == ("abort", 500, "NaN happened")
    assert len(harness.outcomes["good"].ids) == 9


@pytest.mark.parametrize(
    ("options", "events"),
    [
        ({"stream": True}, 12),
        ({"stream": True, "stream_interval": 5}, 4),  # 1, 6, 11, 12
        ({"stream": False}, 2),
        ({"stream": False, "stop": ("x",)}, 12),  # the frontend has to look at every token
    ],
)
def test_emission_intervals(options: dict[str, object], events: int) -> None:
    harness = Harness()
    harness.submit("a", prompt(5), max_new_tokens=12, **options)  # type: ignore[arg-type]
    harness.drain()
    assert harness.outcomes["a"].num_events == events
    assert len(harness.outcomes["a"].ids) == 12


def test_abort_ends_what_runs_and_what_waits() -> None:
    harness = Harness(max_running_requests=2)
    for rid in ("job-1", "job-2", "job-3", "other"):
        harness.submit(rid, prompt(4, len(rid) + 10), max_new_tokens=20)
    harness.turn(3)
    harness.abort("job-1", "job-2", "job-3")
    harness.turn()
    ends = {
        rid: outcome.finish.message
        for rid, outcome in harness.outcomes.items()
        if outcome.finish is not None
    }
    assert ends == {"job-1": "Aborted", "job-2": "Aborted", "job-3": "Abort in waiting queue"}
    harness.drain()
    assert harness.outcomes["other"].finish is not None
    assert harness.outcomes["other"].finish.type == "length"


def test_stop_is_exact_and_silent() -> None:
    harness = Harness()
    harness.submit("a", prompt(4, 10), max_new_tokens=20)
    harness.submit("ab", prompt(4, 20), max_new_tokens=20)
    harness.turn(3)
    harness.stop("a")
    harness.drain()
    assert harness.outcomes["a"].finish is None
    assert len(harness.outcomes["ab"].ids) == 20


def test_outputs_of_a_finished_request_are_a_prefix_for_the_next_turn() -> None:
    harness = Harness()
    harness.submit("turn1", prompt(10), max_new_tokens=5)
    harness.drain()
    conversation = prompt(10) + harness.outcomes["turn1"].ids
    harness.submit("turn2", [*conversation, 42, 43], max_new_tokens=2)
    harness.drain()
    assert (
        harness.outcomes["turn2"].num_cached == 14
    )  # the last output has no KV: it was never fed back


def test_a_retracted_request_that_waits_again_is_aborted_in_the_queue() -> None:
    harness = Harness(num_pages=60, conservativeness=0.01)
    for index in range(4):
        harness.submit(f"r{index}", range(10 * index, 10 * index + 6), max_new_tokens=30)
        harness.turn()
    for _ in range(100):
        if harness.recorder.retractions:
            break
        harness.turn()
    waiting = {seq.rid for seq in harness.scheduler.state.queue}
    assert 0 < len(waiting) < 4
    harness.abort(*harness.outcomes)
    harness.turn()
    for rid, outcome in harness.outcomes.items():
        assert outcome.ids, "what it has is sent"
        assert outcome.finish is not None
        assert outcome.finish.message == ("Abort in waiting queue" if rid in waiting else "Aborted")
