"""Who gets a turn, and for how long: decode between prefills, admissions that wait for company,
time limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from setpoint.core.records import AdmissionRefusal, RequestDone
from setpoint.core.settings import CadenceSettings, DelaySettings, PrioritySettings
from setpoint.scheduler import loop
from setpoint.scheduler.cadence import Cadence
from setpoint.scheduler.delay import AdmissionDelay, DelayView
from setpoint.scheduler.loop import IDLE_WAIT_S, SETTLING_S
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.scripted import hashed_token, reference

DEPTHS = pytest.mark.parametrize(("depth", "replan"), [(0, True), (1, True), (2, True), (2, False)])
WAITED = "Request waiting timeout reached."
RAN = "Request running timeout reached."


def prompt(length: int, first: int = 10) -> list[int]:
    return [first, *((first * 7 + index) % VOCAB for index in range(length - 1))]


def expected(length: int, first: int, num_new: int) -> list[int]:
    return reference(np.array(prompt(length, first), np.int32), num_new, hashed_token(VOCAB))


def kinds(harness: Harness) -> str:
    """P for every prefill step, D for every decode step, M for both in one."""
    letters = {(True, False): "P", (False, True): "D", (True, True): "M"}
    return "".join(
        letters[stats.num_prefill_rows > 0, stats.num_decode_rows > 0]
        for stats in harness.recorder.steps
    )


# ---------------------------------------------------------------------- cadence


@pytest.mark.parametrize(
    ("cadence", "steps"),
    [
        (CadenceSettings(), "PDPPPPDD"),
        (CadenceSettings(prefill_decode_interval=2), "PDDPDDPDDP"),
        (CadenceSettings(prefill_decode_interval=2, min_decoding=2), "PDPPPDDP"),
        (CadenceSettings(continuous_decode_steps=3), "PDDDPPPPDDD"),
        (CadenceSettings(prefill_decode_interval=1, continuous_decode_steps=3), "PDPDPDPDPDDD"),
        (
            CadenceSettings(decode_after_piece=1),
            "PDPDPDPPDD",
        ),  # the third chunk reads the end of b and the beginning of c
    ],
)
def test_decode_steps_between_prefills(cadence: CadenceSettings, steps: str) -> None:
    harness = Harness(num_pages=200, chunked_prefill_size=8, cadence=cadence)
    harness.submit("a", prompt(4, 10), max_new_tokens=40)
    harness.turn(2)
    harness.submit(
        "b", prompt(20, 20), max_new_tokens=40
    )  # three chunks; the last has room for one more
    harness.submit("c", prompt(9, 30), max_new_tokens=40)
    harness.turn(len(steps) - 2)
    assert kinds(harness).startswith(steps)
    harness.drain()
    assert harness.outcomes["b"].ids == expected(20, 20, 40)


def test_newcomers_do_not_wait_for_decode_turns_between_pieces() -> None:
    """A burst of short prompts is admitted step by step, whether or not its last one is cut; then
    everybody decodes."""
    harness = Harness(
        num_pages=400, chunked_prefill_size=16, cadence=CadenceSettings(decode_after_piece=1)
    )
    harness.submit("runs", prompt(4, 3), max_new_tokens=40)
    harness.turn(2)
    for number in range(7):
        harness.submit(f"r{number}", prompt(7, 10 + number), max_new_tokens=3)
    harness.turn(5)
    assert kinds(harness) == "PDPPPPD"


def test_who_waits_for_a_decode_turn_is_counted() -> None:
    harness = Harness(cadence=CadenceSettings(prefill_decode_interval=3))
    harness.submit("a", prompt(4, 10), max_new_tokens=20)
    harness.turn()
    harness.submit("b", prompt(4, 20))
    harness.submit("c", prompt(4, 30))
    harness.turn()
    assert harness.recorder.steps[-1].refusals == {
        AdmissionRefusal.DECODE_TURN: 1,
        AdmissionRefusal.BLOCKED: 1,
    }
    harness.drain()


def test_who_waits_between_the_pieces_of_a_prompt_waits_for_its_chunks() -> None:
    """No option asked for this turn, so the reason names none."""
    harness = Harness(
        num_pages=200, chunked_prefill_size=8, cadence=CadenceSettings(decode_after_piece=1)
    )
    harness.submit("a", prompt(4, 10), max_new_tokens=20)
    harness.turn(2)
    harness.submit("long", prompt(24, 20))
    harness.submit("b", prompt(4, 30))
    harness.turn(2)
    assert kinds(harness) == "PDPD"
    assert harness.recorder.steps[-1].refusals == {AdmissionRefusal.CHUNK_BUDGET: 1}
    harness.drain()


def test_prefill_never_waits_for_nobody() -> None:
    cadence, settings = Cadence(), CadenceSettings(prefill_decode_interval=5)
    cadence.record_step(prefill=True, chunk_only=False, num_decoding=1, settings=settings)
    assert cadence.refusal(1, settings) is AdmissionRefusal.DECODE_TURN
    assert cadence.refusal(0, settings) is None
    harness = Harness(
        num_pages=200, chunked_prefill_size=8, cadence=CadenceSettings(prefill_decode_interval=5)
    )
    harness.submit("a", prompt(40), max_new_tokens=2)
    harness.turn(5)
    assert kinds(harness) == "PPPPP"


@DEPTHS
def test_tokens_do_not_depend_on_the_cadence(depth: int, replan: bool) -> None:
    harness = Harness(
        num_pages=44, chunked_prefill_size=8, depth=depth, replan_inflight=replan, conservativeness=0.01,
        cadence=CadenceSettings(prefill_decode_interval=3, continuous_decode_steps=2),
    )  # fmt: skip
    for number in range(5):
        harness.submit(f"r{number}", prompt(6 + number, 10 + number), max_new_tokens=24)
        harness.turn(2)
    harness.drain()
    assert harness.recorder.retractions
    for number in range(5):
        assert harness.outcomes[f"r{number}"].ids == expected(6 + number, 10 + number, 24)


# ---------------------------------------------------------------------- delayed admission


def view(
    num_running: int = 4,
    num_free_slots: int = 1,
    num_queued: int = 1,
    usage: float = 0.5,
    now: float = 0.0,
) -> DelayView:
    return DelayView(num_running, num_free_slots, num_queued, usage, now)


def delay(largest: int) -> AdmissionDelay:
    """A rule that has seen a prefill batch of so many."""
    rule = AdmissionDelay()
    rule.record_admissions(largest)
    return rule


@pytest.mark.parametrize(
    ("config", "look", "holds"),
    [
        ({}, view(), False),
        ({"enabled": True}, view(), True),
        ({"enabled": True}, view(num_running=0), False),
        ({"enabled": True}, view(num_free_slots=3), False),
        ({"enabled": True, "low_usage": 0.6}, view(), False),
        ({"enabled": True, "low_usage": 0.4}, view(), True),
        ({"enabled": True, "queue_ratio": 0.5}, view(num_free_slots=9), True),
        ({"enabled": True, "queue_ratio": 0.5}, view(num_free_slots=9, num_queued=2), False),
        (
            {"enabled": True, "queue_ratio": 0.5},
            view(num_running=100, num_free_slots=9, num_queued=3),
            False,
        ),
        ({"enabled": True, "queue_ratio": 0.1}, view(num_free_slots=9), False),
        ({"queue_ratio": 0.5}, view(num_free_slots=9), False),
        ({"min_free_slots": 2}, view(), True),
        ({"min_free_slots": 2}, view(num_free_slots=2), False),
        ({"min_free_slots": 2}, view(num_running=0), False),
    ],
)
def test_when_admission_waits(config: dict[str, Any], look: DelayView, holds: bool) -> None:
    assert delay(3).holds(look, DelaySettings(**config)) is holds


def test_a_wait_ends_after_its_passes_and_its_time() -> None:
    rule, settings = delay(3), DelaySettings(enabled=True, max_passes=4)
    held = [rule.holds(view(), settings) for _ in range(10)]
    assert held == [True] * 4 + [False] + [True] * 4 + [False]
    rule, settings = delay(3), DelaySettings(enabled=True, max_delay_s=0.5)
    held = [rule.holds(view(now=now), settings) for now in (7.0, 7.4, 7.6, 7.7)]
    assert held == [True, True, False, True]


def test_delayed_admissions_come_together_and_are_counted() -> None:
    def admitted(**rules: Any) -> list[int]:
        harness = Harness(num_pages=900, max_running_requests=8, delay=DelaySettings(**rules))
        for number in range(8):
            harness.submit(f"first{number}", prompt(4, 10 + number), max_new_tokens=4 + 2 * number)
        for number in range(8):
            harness.submit(f"next{number}", prompt(4, 40 + number), max_new_tokens=60)
        harness.drain()
        delayed = any(
            AdmissionRefusal.DELAYED in stats.refusals for stats in harness.recorder.steps
        )
        assert delayed == bool(rules)
        return [stats.num_new_seqs for stats in harness.recorder.steps if stats.num_new_seqs]

    assert admitted()[:4] == [8, 1, 1, 1]
    assert admitted(min_free_slots=3)[:3] == [8, 3, 3]
    assert admitted(enabled=True, max_passes=6)[:2] == [8, 2]


# ---------------------------------------------------------------------- time limits


def finish_of(harness: Harness, rid: str) -> tuple[str, int | None, str | None]:
    finish = harness.outcomes[rid].finish
    assert finish is not None
    return finish.type, finish.status_code, finish.message


@DEPTHS
def test_a_request_waits_no_longer_than_allowed(depth: int, replan: bool) -> None:
    harness = Harness(
        max_running_requests=1, waiting_timeout_s=5.0, depth=depth, replan_inflight=replan
    )
    harness.submit("runs", prompt(4, 10), max_new_tokens=30)
    harness.submit("old", prompt(4, 20))
    harness.turn(3)
    harness.clock.advance(4.0)
    harness.submit("young", prompt(4, 30))
    harness.turn()
    assert harness.waiting() == ["old", "young"]
    harness.clock.advance(2.0)
    harness.turn()
    assert harness.waiting() == ["young"]
    assert finish_of(harness, "old") == ("abort", 503, WAITED)
    (dropped,) = harness.recorder.of(RequestDone)
    assert (dropped.rid, dropped.finish.message, dropped.admitted_at) == ("old", WAITED, None)
    harness.drain()
    assert harness.outcomes["runs"].ids == expected(4, 10, 30)
    assert harness.outcomes["young"].ids == expected(4, 30, 4)


@DEPTHS
def test_a_request_runs_no_longer_than_allowed(depth: int, replan: bool) -> None:
    harness = Harness(
        max_running_requests=2, running_timeout_s=5.0, depth=depth, replan_inflight=replan
    )
    harness.submit("a", prompt(4, 10), max_new_tokens=50)
    harness.turn(4)
    harness.clock.advance(3.0)
    harness.submit("b", prompt(4, 20), max_new_tokens=9)
    harness.turn(3)
    assert bool(harness.sequence("a").inflight_steps) == bool(depth), (
        "it ends while a step of it is in flight"
    )
    harness.clock.advance(3.0)
    harness.turn()
    assert finish_of(harness, "a") == ("abort", 503, RAN)
    harness.drain()
    assert harness.outcomes["a"].ids == expected(4, 10, 50)[: len(harness.outcomes["a"].ids)]
    assert harness.outcomes["b"].ids == expected(4, 20, 9)


def test_the_time_in_the_queue_is_no_running_time() -> None:
    harness = Harness(max_running_requests=1, running_timeout_s=5.0)
    harness.submit("a", prompt(4, 10), max_new_tokens=4)
    harness.submit("b", prompt(4, 20), max_new_tokens=9)
    harness.turn()
    harness.clock.advance(4.0)
    harness.turn(5)
    assert harness.running() == ["b"]
    harness.clock.advance(4.0)
    harness.drain()
    assert harness.outcomes["b"].ids == expected(4, 20, 9)


def test_the_prompt_in_mid_prefill_can_run_out_of_time() -> None:
    harness = Harness(num_pages=100, chunked_prefill_size=8, running_timeout_s=5.0)
    harness.submit("long", prompt(60), max_new_tokens=2)
    harness.turn(2)
    harness.clock.advance(6.0)
    harness.submit("next", prompt(6, 20), max_new_tokens=2)
    harness.drain()
    assert finish_of(harness, "long") == ("abort", 503, RAN)
    assert harness.outcomes["next"].ids == expected(6, 20, 2)


def test_a_preempted_request_starts_to_wait_anew() -> None:
    harness = Harness(
        max_running_requests=1, waiting_timeout_s=5.0, priority=PrioritySettings(threshold=0)
    )
    harness.submit("slow", prompt(4, 10), max_new_tokens=20, priority=0)
    harness.turn(3)
    harness.clock.advance(100.0)
    harness.submit("urgent", prompt(4, 20), max_new_tokens=20, priority=1)
    harness.turn(2)
    harness.clock.advance(4.0)
    harness.turn()
    assert harness.waiting() == ["slow"]
    harness.clock.advance(2.0)
    harness.turn()
    assert finish_of(harness, "slow") == ("abort", 503, WAITED)
    harness.drain()


# ---------------------------------------------------------------------- idle turns


def test_an_idle_engine_prepares_once_the_answer_is_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(num_pages=100)
    asked: list[bool] = []
    waits: list[float] = []
    receive = harness.wire.receive
    left = [2]

    def idle() -> bool:
        asked.append(harness.scheduler.state.is_idle)
        left[0] -= 1
        return left[0] >= 0

    monkeypatch.setattr(harness.executor, "idle", idle)
    monkeypatch.setattr(
        harness.wire, "receive", lambda timeout_s: (waits.append(timeout_s), receive(timeout_s))[1]
    )
    harness.turn(3)
    assert (waits, len(asked)) == ([0.0, 0.0, IDLE_WAIT_S], 3)
    harness.submit("a", prompt(4), max_new_tokens=3)
    harness.drain()
    assert len(asked) == 4, "not while there is something to compute"
    waits.clear()
    left[0] = 1
    harness.turn(3)
    assert waits == [SETTLING_S, 0.0, IDLE_WAIT_S]
    assert all(asked)


def test_strict_accounting_checks_an_idle_engine_once_as_long_as_nothing_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(num_pages=100, strict_accounting=True)
    checks: list[int] = []
    violations = loop.invariants.violations
    monkeypatch.setattr(
        loop.invariants, "violations", lambda state: (checks.append(1), violations(state))[1]
    )
    monkeypatch.setattr(harness.executor, "idle", lambda: True)
    for _ in range(10):
        harness.loop.step()
    assert len(checks) == 1
    harness.submit("a", prompt(4), max_new_tokens=3)
    for _ in range(10):
        harness.loop.step()
    assert len(checks) == 4, "after each of the three steps, and no more once it is idle again"
