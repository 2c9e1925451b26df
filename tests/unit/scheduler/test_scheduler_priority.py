"""Priority scheduling (docs/sglang/scheduling.md#priorities): order, preemption, replacement in a
full queue, refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from setpoint.core.records import AdmissionRefusal, Fallback, RequestDone
from setpoint.core.settings import PrioritySettings
from setpoint.scheduler.preemption import UrgencyView, preemption_order
from setpoint.scheduler.retraction import RunningView, retraction_order
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.scripted import hashed_token, reference

DEPTHS = pytest.mark.parametrize(("depth", "replan"), [(0, True), (1, True), (2, True), (2, False)])


def prompt(length: int, first: int = 10) -> list[int]:
    return [first, *((first * 7 + index) % VOCAB for index in range(length - 1))]


def expected(length: int, first: int, num_new: int) -> list[int]:
    return reference(np.array(prompt(length, first), np.int32), num_new, hashed_token(VOCAB))


def prioritized(
    *,
    slots: int = 1,
    default: int | None = None,
    low_first: bool = False,
    threshold: int = 10,
    **more: Any,
) -> Harness:
    rule = {key: more.pop(key) for key in ("preempt", "retract_first") if key in more}
    config = PrioritySettings(default=default, low_first=low_first, threshold=threshold, **rule)
    return Harness(max_running_requests=slots, priority=config, **{"num_pages": 200, **more})


def order_of_ends(harness: Harness) -> list[str]:
    """Drain, noting who ends when."""
    ended: list[str] = []
    while not harness.scheduler.state.is_idle or harness.wire.inbox:
        harness.turn()
        ended += [
            rid
            for rid, outcome in harness.outcomes.items()
            if outcome.finish is not None and rid not in ended
        ]
    return ended


def test_urgency_follows_the_priority_and_the_sign() -> None:
    high, low = PrioritySettings(), PrioritySettings(low_first=True)
    assert sorted([3, None, -9, 40], key=high.urgency, reverse=True) == [40, 3, -9, None]
    assert sorted([3, None, -9, 40], key=low.urgency, reverse=True) == [-9, 3, 40, None]
    assert PrioritySettings(default=5).urgency(None) == PrioritySettings(default=5).urgency(5)
    assert high.urgency(-(2**63)) > high.urgency(None)
    assert low.urgency(2**63 - 1) > low.urgency(None)


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, ["b", "d", "a", "c", "none"]),
        ({"low_first": True}, ["c", "a", "b", "d", "none"]),
        ({"default": 3}, ["b", "d", "a", "none", "c"]),
        ({"policy": "lof"}, ["d", "b", "a", "c", "none"]),
    ],
)
def test_the_most_urgent_goes_first(options: dict[str, Any], ends: list[str]) -> None:
    harness = prioritized(preempt=False, **options)
    for number, (rid, priority) in enumerate(
        [("a", 3), ("b", 7), ("c", -2), ("d", 7), ("none", None)]
    ):
        harness.submit(
            rid, prompt(4, 10 + number), max_new_tokens=9 if rid == "d" else 4, priority=priority
        )
    assert order_of_ends(harness) == ends


def test_without_priority_scheduling_a_priority_means_nothing() -> None:
    harness = Harness(max_running_requests=1)
    for number, priority in enumerate([0, 50, 90]):
        harness.submit(f"r{number}", prompt(4, 10 + number), priority=priority)
    assert order_of_ends(harness) == ["r0", "r1", "r2"]
    assert harness.recorder.of(Fallback) == [
        Fallback("priorities do not order the queue", "--enable-priority-scheduling is off")
    ]


def test_a_priority_can_be_refused_where_it_means_nothing() -> None:
    harness = Harness(refuse_priority=True)
    harness.submit("with", prompt(4), priority=1)
    harness.submit("without", prompt(4))
    harness.drain()
    finish = harness.outcomes["with"].finish
    assert finish is not None
    assert (finish.type, finish.status_code) == ("abort", 503)
    assert (
        finish.message
        == "Using priority is disabled for this server. Please send a new request without a"
        " priority."
    )
    assert len(harness.outcomes["without"].ids) == 4
    assert not harness.recorder.of(Fallback)


def test_victims_are_the_least_urgent_then_the_newest_beyond_the_threshold() -> None:
    running = [
        UrgencyView(0, -20),
        UrgencyView(1, -5),
        UrgencyView(2, -20),
        UrgencyView(3, -30),
        UrgencyView(4, -11),
        UrgencyView(5, -10),
    ]
    assert preemption_order(0, running, 10) == [3, 2, 0, 4]
    assert preemption_order(-25, running, 10) == []
    assert preemption_order(0, running, 0) == [3, 2, 0, 4, 5, 1]


@DEPTHS
def test_an_urgent_request_takes_the_slot_of_another_whose_tokens_stay_the_same(
    depth: int, replan: bool
) -> None:
    harness = prioritized(depth=depth, replan_inflight=replan)
    harness.submit("slow", prompt(6, 10), max_new_tokens=30, priority=0)
    harness.turn(8)
    sent = len(harness.outcomes["slow"].ids)
    assert sent > 0
    harness.submit("urgent", prompt(6, 20), max_new_tokens=5, priority=11)
    assert order_of_ends(harness) == ["urgent", "slow"]
    assert harness.outcomes["urgent"].ids == expected(6, 20, 5)
    assert harness.outcomes["slow"].ids == expected(6, 10, 30)
    assert harness.outcomes["slow"].num_retractions == 1
    (event,) = harness.recorder.preemptions
    assert (event.rid, event.preempted) == ("urgent", ("slow",))
    assert event.num_tokens_gained >= 5 + sent
    assert not harness.recorder.retractions


@pytest.mark.parametrize(
    ("options", "priority"),
    [({}, 10), ({"preempt": False}, 99), ({"low_first": True}, 11), ({"threshold": 40}, 40)],
)
def test_no_preemption_within_the_threshold_or_when_it_is_off(
    options: dict[str, Any], priority: int
) -> None:
    harness = prioritized(**options)
    harness.submit("slow", prompt(6, 10), max_new_tokens=20, priority=0)
    harness.turn(4)
    harness.submit("urgent", prompt(6, 20), priority=priority)
    assert order_of_ends(harness) == ["slow", "urgent"]
    assert not harness.recorder.preemptions


def test_a_request_without_priority_makes_room_for_any_that_has_one() -> None:
    harness = prioritized()
    harness.submit("none", prompt(6, 10), max_new_tokens=20)
    harness.turn(4)
    harness.submit("some", prompt(6, 20), priority=-100)
    assert order_of_ends(harness) == ["some", "none"]


def test_of_several_the_least_urgent_and_newest_makes_room() -> None:
    harness = prioritized(slots=4)
    for number, priority in enumerate([20, 0, 0, 5]):
        harness.submit(f"r{number}", prompt(4, 10 + number), max_new_tokens=30, priority=priority)
        harness.turn(2)
    harness.submit("urgent", prompt(4, 60), max_new_tokens=3, priority=50)
    harness.turn()
    assert harness.running() == ["r0", "r1", "r3", "urgent"]
    assert harness.waiting() == ["r2"]
    harness.drain()


def test_memory_is_a_reason_too_and_no_more_go_than_must() -> None:
    harness = prioritized(slots=8, num_pages=100, threshold=0)
    for number in range(4):
        harness.submit(f"r{number}", prompt(12, 10 + number), max_new_tokens=12, priority=number)
    harness.turn(2)
    assert len(harness.running()) == 4
    harness.submit("urgent", prompt(44, 60), max_new_tokens=8, priority=9)
    harness.turn()
    assert harness.running() == ["r3", "r2", "urgent"]
    (event,) = harness.recorder.preemptions
    assert event.preempted == ("r0", "r1")
    harness.drain()
    for number in range(4):
        assert harness.outcomes[f"r{number}"].ids == expected(12, 10 + number, 12)


def test_no_one_goes_if_it_would_not_be_enough() -> None:
    harness = prioritized(slots=8, num_pages=100)
    harness.submit("equal", prompt(60, 10), max_new_tokens=20, priority=50)
    harness.submit("low", prompt(5, 20), max_new_tokens=12, priority=0)
    harness.turn(2)
    assert harness.running() == ["equal", "low"]
    harness.submit("urgent", prompt(60, 30), max_new_tokens=8, priority=50)
    harness.turn(3)
    assert harness.running() == ["equal", "low"]
    assert harness.recorder.steps[-1].refusals == {AdmissionRefusal.NO_MEMORY: 1}
    assert not harness.recorder.preemptions
    harness.drain()


def test_what_the_kept_share_with_a_victim_is_not_counted_as_gained() -> None:
    """The long prefix stays locked by the request that is too urgent to go: sending the other back
    would not make room."""
    harness = prioritized(slots=8, num_pages=100, threshold=0)
    shared = prompt(50, 10)
    harness.submit("kept", [*shared, 1], max_new_tokens=10, priority=9)
    harness.submit("low", [*shared, 2], max_new_tokens=10, priority=0)
    harness.turn(2)
    assert harness.running() == ["kept", "low"]
    harness.submit("urgent", prompt(40, 60), max_new_tokens=8, priority=9)
    harness.turn(2)
    assert not harness.recorder.preemptions
    harness.drain()
    assert len(harness.outcomes["urgent"].ids) == 8


@DEPTHS
def test_the_prompt_in_mid_prefill_is_not_interrupted(depth: int, replan: bool) -> None:
    harness = prioritized(
        slots=2, num_pages=200, chunked_prefill_size=8, depth=depth, replan_inflight=replan
    )
    harness.submit("running", prompt(4, 10), max_new_tokens=40, priority=0)
    harness.turn(3)
    harness.submit("long", prompt(60, 20), max_new_tokens=5, priority=5)
    harness.turn(2)
    harness.submit("urgent", prompt(4, 30), max_new_tokens=5, priority=90)
    harness.turn()
    while not harness.sequence("long").prefilled:
        assert harness.waiting() == ["urgent"]
        harness.turn()
    harness.turn(2 * depth + 2)
    assert harness.waiting() == ["running"], (
        "the least urgent made room, once the prompt was through"
    )
    harness.drain()
    assert harness.outcomes["running"].ids == expected(4, 10, 40)
    assert harness.outcomes["long"].ids == expected(60, 20, 5)
    assert harness.outcomes["urgent"].ids == expected(4, 30, 5)


@DEPTHS
def test_preemption_in_mixed_steps(depth: int, replan: bool) -> None:
    harness = prioritized(
        slots=3, mixed_chunk=True, chunked_prefill_size=8, depth=depth, replan_inflight=replan
    )
    for number in range(3):
        harness.submit(f"r{number}", prompt(9, 10 + number), max_new_tokens=25, priority=number)
    harness.turn(12)
    assert len(harness.running()) == 3
    harness.submit("urgent", prompt(20, 60), max_new_tokens=6, priority=40)
    harness.drain()
    assert [event.preempted for event in harness.recorder.preemptions] == [("r0",)]
    for number in range(3):
        assert harness.outcomes[f"r{number}"].ids == expected(9, 10 + number, 25)
    assert harness.outcomes["urgent"].ids == expected(20, 60, 6)


def test_the_preempted_never_preempt_back() -> None:
    harness = prioritized(threshold=0)
    for number in range(6):
        harness.submit(f"r{number}", prompt(4, 10 + number), max_new_tokens=12, priority=number)
        harness.turn(3)
    assert order_of_ends(harness) == [f"r{number}" for number in reversed(range(6))]
    assert len(harness.recorder.preemptions) == 5


def test_a_full_queue_gives_up_its_least_urgent_for_a_better_one() -> None:
    harness = prioritized(max_queued_requests=2, preempt=False)
    for rid, priority in (("running", 9), ("worse", 1), ("better", 5)):
        harness.submit(rid, prompt(4, 10 + len(rid)), max_new_tokens=8, priority=priority)
        harness.turn()
    for rid, priority in (("equal", 1), ("urgent", 7)):
        harness.submit(rid, prompt(4, 30 + len(rid)), max_new_tokens=8, priority=priority)
    harness.turn(2)
    finishes = {rid: harness.outcomes[rid].finish for rid in ("worse", "equal")}
    messages = {
        rid: (finish.status_code, finish.message)
        for rid, finish in finishes.items()
        if finish is not None
    }
    assert messages == {
        "worse": (503, "The request is aborted by a higher priority request."),
        "equal": (503, "The request queue is full."),
    }
    assert harness.waiting() == ["better", "urgent"]
    refused, dropped = harness.recorder.of(RequestDone)
    assert (refused.rid, refused.accepted_at is None) == ("equal", True)
    assert (dropped.rid, dropped.accepted_at is None) == ("worse", False)
    assert order_of_ends(harness)[-3:] == ["running", "urgent", "better"]


def test_of_equally_urgent_ones_a_full_queue_gives_up_the_newest() -> None:
    harness = prioritized(max_queued_requests=2, preempt=False)
    harness.submit("running", prompt(4, 10), max_new_tokens=8, priority=9)
    harness.turn()
    for number, priority in enumerate((1, 1, 2)):
        harness.submit(f"r{number}", prompt(4, 20 + number), priority=priority)
    harness.turn()
    assert harness.waiting() == ["r0", "r2"]
    harness.drain()


def test_a_full_queue_keeps_those_that_have_run() -> None:
    harness = prioritized(max_queued_requests=1, threshold=0)
    harness.submit("first", prompt(4, 10), max_new_tokens=20, priority=0)
    harness.turn(4)
    harness.submit("second", prompt(4, 20), max_new_tokens=20, priority=5)
    harness.turn(2)
    assert harness.waiting() == ["first"]
    harness.submit("third", prompt(4, 30), priority=3)
    harness.drain()
    assert harness.outcomes["third"].finish is not None
    assert harness.outcomes["third"].finish.message == "The request queue is full."
    assert harness.outcomes["first"].ids == expected(4, 10, 20)


def test_retraction_by_priority_comes_before_length() -> None:
    views = [
        RunningView(0, 5, 10, urgency=-1),
        RunningView(1, 2, 10, urgency=0),
        RunningView(2, 9, 30, urgency=-1),
        RunningView(3, 1, 1, urgency=-3),
    ]
    assert retraction_order(views) == [3, 0, 2, 1]


@pytest.mark.parametrize(("retract_first", "retracted"), [(True, "low"), (False, "high")])
def test_a_dry_pool_spares_the_urgent(retract_first: bool, retracted: str) -> None:
    harness = prioritized(
        slots=4,
        num_pages=50,
        retract_first=retract_first,
        preempt=False,
        conservativeness=0.01,
    )
    harness.submit("low", prompt(6, 10), max_new_tokens=32, priority=0)
    harness.turn(6)
    harness.submit("high", prompt(6, 20), max_new_tokens=25, priority=9)
    harness.drain()
    assert harness.recorder.retractions
    assert {rid for rid, outcome in harness.outcomes.items() if outcome.num_retractions} == {
        retracted
    }
    assert harness.outcomes["low"].ids == expected(6, 10, 32)
    assert harness.outcomes["high"].ids == expected(6, 20, 25)
