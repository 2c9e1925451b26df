"""What a request may ask for at the door, and what of it is clipped, refused or counted."""

from __future__ import annotations

import random

import pytest

from setpoint.core.records import RequestClipped
from setpoint_testing.harness import VOCAB, Harness


def prompt(length: int, first: int = 10) -> list[int]:
    """Distinct requests share no prefix: the first token tells them apart."""
    return [first, *((first * 7 + index) % VOCAB for index in range(length - 1))]


def test_a_full_queue_refuses_with_503() -> None:
    harness = Harness(max_running_requests=1, max_queued_requests=2)
    for number in range(5):
        harness.submit(f"r{number}", prompt(3, 10 + number))
    harness.turn()
    refused = [
        outcome.finish for outcome in harness.outcomes.values() if outcome.finish is not None
    ]
    assert [(finish.type, finish.status_code, finish.message) for finish in refused] == [
        ("abort", 503, "The request queue is full.")
    ] * 3
    harness.drain()
    assert (
        sum(
            outcome.finish.type == "length"
            for outcome in harness.outcomes.values()
            if outcome.finish
        )
        == 2
    )


def test_a_request_of_an_engine_that_has_ended_is_not_refused_by_a_full_queue() -> None:
    harness = Harness(max_running_requests=1, max_queued_requests=2)
    for number in range(5):
        harness.submit(f"r{number}", prompt(3, 10 + number), was_accepted=number > 2)
    harness.drain()
    refused = [
        rid
        for rid, outcome in harness.outcomes.items()
        if outcome.finish is not None and outcome.finish.type == "abort"
    ]
    assert refused == ["r2"]


def test_a_retracted_request_is_not_refused_by_a_full_queue() -> None:
    harness = Harness(num_pages=40, max_queued_requests=1, conservativeness=0.1)
    for number in range(4):
        harness.submit(f"r{number}", prompt(3, 10 + number), max_new_tokens=20)
        harness.turn()
    harness.drain()
    assert harness.recorder.retractions
    assert all(
        outcome.finish is not None and outcome.finish.type == "length"
        for outcome in harness.outcomes.values()
    )


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "The prompt is empty."),
        ([1, VOCAB], f"A token id is outside the vocabulary of {VOCAB}."),
        ([1, -1], f"A token id is outside the vocabulary of {VOCAB}."),
        (
            [1] * 58,
            (
                "Input length (58 tokens) exceeds the maximum allowed length (57 tokens). Use a"
                " shorter input, or enable --allow-auto-truncate at the start."
            ),
        ),
    ],
)
def test_requests_that_can_never_be_served_are_refused_at_the_door(
    ids: list[int], message: str
) -> None:
    harness = Harness(num_pages=64)
    harness.submit("a", ids)
    harness.turn()
    finish = harness.outcomes["a"].finish
    assert finish is not None
    assert (finish.type, finish.status_code, finish.message) == ("abort", 400, message)


def test_max_new_tokens_is_clipped_to_what_an_empty_pool_can_hold_and_said() -> None:
    harness = Harness(num_pages=64)
    harness.submit("a", prompt(20), max_new_tokens=1000)
    harness.drain()
    # 64 - 20 - one page - 1, also 63 - 20 - 1
    assert harness.recorder.of(RequestClipped) == [RequestClipped("a", 1000, 42)]
    assert len(harness.outcomes["a"].ids) == 42


def test_a_prompt_whose_pages_leave_no_room_for_output_is_refused_not_livelocked() -> None:
    # 4 pages of 16: 49 tokens fill all of them. The pool's token count alone would admit it.
    harness = Harness(page_size=16, num_pages=4)
    harness.submit("a", prompt(49), max_new_tokens=1)
    harness.turn()
    finish = harness.outcomes["a"].finish
    assert finish is not None
    assert finish.status_code == 400
    assert "leaves no room for output" in (finish.message or "")


@pytest.mark.parametrize(("length", "room"), [(385, 62), (445, 2), (446, 1), (447, None)])
def test_a_prompt_that_ends_in_the_middle_of_a_page_has_the_rest_of_it(
    length: int, room: int | None
) -> None:
    """Admission keeps a page and a token free, and no more."""
    harness = Harness(page_size=64, num_pages=8, chunked_prefill_size=128)
    harness.submit("a", prompt(length), max_new_tokens=1000)
    harness.drain()
    outcome = harness.outcomes["a"]
    assert outcome.finish is not None
    assert outcome.finish.type == ("abort" if room is None else "length")
    assert len(outcome.ids) == (room or 0)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("seed", range(6))
def test_whoever_is_admitted_can_finish(page_size: int, seed: int) -> None:
    """Requests as long as the pool allows, some with a common beginning, side by side in a pool that
    holds one of them."""
    draw = random.Random(seed)
    num_pages = draw.choice([4, 7, 12]) if page_size > 2 else draw.choice([20, 31])
    chunk = draw.choice([None, page_size, 3 * page_size])
    harness = Harness(
        page_size=page_size,
        num_pages=num_pages,
        chunked_prefill_size=chunk,
        conservativeness=draw.choice([0.01, 1.0]),
        depth=draw.choice([0, 1, 2]),
    )
    longest = (num_pages - 1) * page_size - 2
    longest = min(longest, harness.config.max_req_input_len - 1)
    for number in range(6):
        length = draw.randint(max(1, longest - page_size), longest)
        begin = prompt(length // 2, 7)
        harness.submit(
            f"r{number}", [*begin, *prompt(length - len(begin), number)], max_new_tokens=9
        )
        harness.turn(draw.randrange(3))
    harness.drain()
    for outcome in harness.outcomes.values():
        assert outcome.finish is not None
        assert outcome.finish.type != "abort", outcome.finish
        assert outcome.ids


def test_zero_new_tokens_computes_the_prompt_and_ends() -> None:
    harness = Harness(chunked_prefill_size=4)
    harness.submit("a", prompt(10), max_new_tokens=0)
    harness.drain()
    finish = harness.outcomes["a"].finish
    assert finish is not None
    assert (finish.type, finish.length, harness.outcomes["a"].ids) == ("length", 0, [])
    assert harness.cache.evictable_tokens == 10


def test_resumed_requests_count_prior_outputs() -> None:
    harness = Harness()
    harness.submit("whole", prompt(6), max_new_tokens=8)
    harness.drain()
    outputs = harness.outcomes["whole"].ids
    harness.submit("resumed", prompt(6), prior=outputs[:5], max_new_tokens=8)
    harness.submit("complete", prompt(6), prior=outputs, max_new_tokens=8)
    harness.drain()
    assert harness.outcomes["resumed"].ids == outputs[5:]
    assert harness.outcomes["complete"].ids == []
    assert harness.outcomes["complete"].finish is not None
    assert harness.plans[-3].admits[0].num_prompt == 6


def test_an_unservable_head_is_aborted_instead_of_waiting_for_ever() -> None:
    harness = Harness(num_pages=30)
    stolen = harness.cache.alloc(25)  # a leak: pages nobody will give back
    assert stolen is not None
    harness.submit("a", prompt(10), max_new_tokens=10)
    harness.loop.step()
    harness._collect()
    finish = harness.outcomes["a"].finish
    assert finish is not None
    assert (finish.type, finish.status_code) == ("abort", 500)
    assert "(no_memory); 5 of 30 tokens" in str(finish.message)
