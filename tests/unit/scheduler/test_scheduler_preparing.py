"""Requests that wait for their grammar: nobody waits for them, they keep their place, and every way
to end finds them."""

from __future__ import annotations

import numpy as np
import pytest

from setpoint.core.control import FlushCache, GetState
from setpoint.core.errors import RequestError
from setpoint.core.messages import Prepared
from setpoint.core.records import PreparationStarted, Received, RequestDone
from setpoint.core.request import Request
from setpoint.core.settings import PrioritySettings
from setpoint.scheduler.sequence import Status
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.preparers import AnyToken, ScriptedPreparer
from setpoint_testing.scripted import hashed_token, reference

PROMPT = [10, 11, 12]


def held(**config: object) -> tuple[Harness, ScriptedPreparer]:
    """Requests named g… wait until the test lets them go."""
    preparer = ScriptedPreparer(
        lambda request: AnyToken(), needs=lambda request: request.rid.startswith("g"), hold=True
    )
    return Harness(preparer=preparer, **config), preparer  # type: ignore[arg-type]


def expected(num_new: int, prompt: list[int] = PROMPT) -> list[int]:
    return reference(np.array(prompt, np.int32), num_new, hashed_token(VOCAB))


def test_nobody_waits_for_a_request_that_is_prepared() -> None:
    h, preparer = held(max_running_requests=1)
    h.submit("g", PROMPT, max_new_tokens=4)
    h.submit("a", PROMPT, max_new_tokens=4)
    h.turn(9)
    assert h.outcomes["a"].ids == expected(4)
    assert h.outcomes["g"].ids == []
    assert h.sequence("g").status is Status.PREPARING
    preparer.finish(0)
    h.drain()
    assert h.outcomes["g"].ids == expected(4)
    assert not preparer.open


def test_it_stands_at_its_place_of_arrival() -> None:
    h, preparer = held(max_running_requests=1)
    h.submit("a", PROMPT, max_new_tokens=20)
    for rid in ("g1", "b", "g2", "c"):
        h.submit(rid, PROMPT, max_new_tokens=2)
    h.turn(2)
    assert h.waiting() == ["b", "c"]
    preparer.finish(h.seq_id("g2"))
    h.turn()
    assert h.waiting() == ["b", "g2", "c"]
    preparer.finish(h.seq_id("g1"))
    h.turn()
    assert h.waiting() == ["g1", "b", "g2", "c"]
    h.drain()
    order = [plan.admits[0].seq_id for plan in h.plans if plan.admits]
    assert order == [0, 1, 2, 3, 4]


def test_a_standing_refusal_of_those_behind_is_not_its_own() -> None:
    h, preparer = held(num_pages=40)
    h.submit("a", PROMPT, max_new_tokens=25, ignore_eos=True)
    h.submit("g", PROMPT, max_new_tokens=2)
    h.submit("big", list(range(30)), max_new_tokens=5)
    h.turn(3)
    assert h.waiting() == ["big"]
    assert h.scheduler.state.standing_refusal is not None
    preparer.finish(h.seq_id("g"))
    h.turn()
    assert "g" in h.running()
    h.drain()


def test_waiting_and_its_end_are_records() -> None:
    h, preparer = held()
    h.submit("g", PROMPT, max_new_tokens=2)
    h.submit("a", PROMPT, max_new_tokens=9)
    h.turn(3)
    assert h.recorder.of(PreparationStarted) == [PreparationStarted("g", 0)]
    assert {step.num_preparing for step in h.recorder.steps} == {1}
    preparer.finish(0)
    h.drain()
    inputs = [record.message for record in h.recorder.of(Received)]
    assert inputs[2] == Prepared(0)
    assert h.recorder.steps[-1].num_preparing == 0


@pytest.mark.parametrize("way", ["abort", "stop", "timeout", "waiting timeout"])
def test_every_early_end_cancels_and_a_late_completion_changes_nothing(way: str) -> None:
    h, preparer = held(
        preparation_timeout_s=5.0 if way == "timeout" else 60.0,
        waiting_timeout_s=5.0 if way == "waiting timeout" else None,
    )
    h.submit("g", PROMPT, max_new_tokens=4)
    h.submit("g2", PROMPT, max_new_tokens=4)
    h.turn(2)
    h.stop("g") if way == "stop" else h.abort("g") if way == "abort" else h.clock.advance(6.0)
    h.turn()
    finish = h.outcomes["g"].finish
    if way == "stop":
        assert finish is None
    else:
        assert finish is not None
        assert finish.status_code == (503 if "timeout" in way else None)
    ended = [done.seq_id for done in h.recorder.of(RequestDone)]
    assert ended == ([0, 1] if "timeout" in way else [0])
    assert preparer.cancelled == ([0, 1] if "timeout" in way else [0])
    h.wire.post(Prepared(0))
    h.turn(2)
    assert h.outcomes["g"].ids == []
    assert not h.plans
    for seq_id in list(preparer.open):
        preparer.finish(seq_id)
    h.drain()
    assert h.outcomes["g2"].ids == ([] if "timeout" in way else expected(4))


def test_the_time_limit_is_kept_by_an_engine_without_work() -> None:
    h, preparer = held(preparation_timeout_s=2.0)
    h.submit("g", PROMPT)
    turns = 0
    while h.outcomes["g"].finish is None:
        h.turn()
        h.clock.advance(0.1)
        turns += 1
    assert 19 <= turns <= 21
    assert preparer.cancelled == [0]
    assert h.outcomes["g"].finish.message == "The grammar of the request was not ready in time."


def test_more_than_may_wait_are_refused() -> None:
    h, preparer = held(max_preparing_requests=2)
    for number in range(4):
        h.submit(f"g{number}", PROMPT, max_new_tokens=1)
    h.submit("free", PROMPT, max_new_tokens=1)
    h.turn(2)
    refusals = [h.outcomes[f"g{number}"].finish for number in range(4)]
    assert refusals[:2] == [None, None]
    assert [finish.status_code for finish in refusals[2:] if finish is not None] == [503, 503]
    assert h.outcomes["free"].finish is not None
    preparer.finish(1)
    h.turn()
    h.submit("g4", PROMPT, max_new_tokens=1)  # there is room again
    h.turn()
    assert h.outcomes["g4"].finish is None
    for seq_id in list(preparer.open):
        preparer.finish(seq_id)
    h.drain()


def test_the_queue_s_limit_counts_them_and_urgency_displaces_them() -> None:
    h, preparer = held(max_queued_requests=2, priority=PrioritySettings(), max_running_requests=1)
    h.submit("a", PROMPT, max_new_tokens=20, priority=9)
    h.turn()
    h.submit("g", PROMPT, priority=1)
    h.submit("b", PROMPT, priority=5)
    h.submit("c", PROMPT, priority=1)
    h.turn()
    c, g = h.outcomes["c"].finish, h.outcomes["g"].finish
    assert c is not None
    assert (c.status_code, g) == (503, None)
    h.submit("d", PROMPT, priority=5)
    h.turn()
    assert h.outcomes["g"].finish is not None
    assert h.outcomes["g"].finish.status_code == 503
    assert preparer.cancelled == [h.seq_id("g")]
    h.drain()


@pytest.mark.parametrize(
    ("error", "status_code"),
    [(RequestError("no such thing as this schema"), 400), (RuntimeError("a bug"), 500)],
)
def test_a_grammar_that_cannot_be_made_ends_its_request_alone(
    error: Exception, status_code: int
) -> None:
    def make(request: Request) -> AnyToken:
        if request.rid == "bad":
            raise error
        return AnyToken()

    h = Harness(preparer=ScriptedPreparer(make))
    for rid in ("bad", "good"):
        h.submit(rid, PROMPT, max_new_tokens=3)
    h.drain()
    finish = h.outcomes["bad"].finish
    assert finish is not None
    assert finish.status_code == status_code
    assert [done.finish for done in h.recorder.of(RequestDone) if done.rid == "bad"] == [finish]
    assert h.outcomes["good"].ids == expected(3)


def test_outputs_that_exist_are_told_to_the_grammar_before_it_is_used() -> None:
    grammars = [AnyToken(), AnyToken(ends_after=3)]
    h = Harness(preparer=ScriptedPreparer(lambda request: grammars[int(request.rid)]))
    prior = expected(6)[:3]
    h.submit("0", PROMPT, prior=prior, max_new_tokens=6)
    h.submit("1", PROMPT, prior=prior, max_new_tokens=6)
    h.drain()
    assert grammars[0].accepted == expected(6) == prior + h.outcomes["0"].ids
    # The grammar admits nothing behind what exists.
    assert h.outcomes["1"].ids == []
    assert h.outcomes["1"].finish is not None
    assert h.outcomes["1"].finish.type == "stop"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_retracted_request_keeps_its_grammar(depth: int) -> None:
    grammars: dict[str, AnyToken] = {}
    preparer = ScriptedPreparer(lambda request: grammars.setdefault(request.rid, AnyToken()))
    h = Harness(num_pages=60, depth=depth, preparer=preparer, conservativeness=0.01)
    for number in range(4):
        h.submit(f"r{number}", [*PROMPT, number], max_new_tokens=30)
        h.turn()
    h.drain()
    assert h.recorder.retractions
    for number in range(4):
        wanted = expected(30, [*PROMPT, number])
        assert h.outcomes[f"r{number}"].ids == grammars[f"r{number}"].accepted == wanted


def test_an_engine_in_which_requests_only_wait_answers_and_is_flushed() -> None:
    h, preparer = held()
    h.submit("a", PROMPT, max_new_tokens=2)
    h.drain()
    h.submit("g", PROMPT, max_new_tokens=2)
    h.turn(2)
    h.wire.inbox += [GetState(1), FlushCache(2)]
    h.turn()
    state, flushed = h.replies
    assert (state.answer.num_queued, state.answer.num_running) == (1, 0)
    assert flushed.answer.is_flushed
    preparer.finish(h.seq_id("g"))
    h.drain()
    assert h.outcomes["g"].ids == expected(2)
