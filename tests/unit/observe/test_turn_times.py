"""The times of a loop's turns: what each part gets, what is waiting, and that nothing is counted
twice."""

from __future__ import annotations

import pytest

from setpoint.core.messages import ToEngine, ToFrontend
from setpoint.core.plan import StepPlan, TokenMasks
from setpoint.core.records import TurnDone
from setpoint.core.result import StepResult
from setpoint.observe.figures import Figures
from setpoint_testing.harness import VOCAB, Harness, ManualClock
from setpoint_testing.scripted import ScriptedExecutor, ScriptedStep, hashed_token

SUBMIT, FINISH, RESULT, RECEIVE, SEND, PREPARE = 1000, 200, 100, 10, 20, 7000
"""Seconds of each."""


class SlowStep:
    def __init__(self, step: ScriptedStep, clock: ManualClock) -> None:
        self._step, self._clock = step, clock

    def finish(self, masks: TokenMasks | None) -> None:
        self._clock.advance(FINISH)
        self._step.finish(masks)

    def result(self) -> StepResult:
        self._clock.advance(RESULT)
        return self._step.result()


class SlowExecutor(ScriptedExecutor):
    clock: ManualClock

    def submit(self, plan: StepPlan) -> SlowStep:  # type: ignore[override]
        self.clock.advance(SUBMIT)
        return SlowStep(super().submit(plan), self.clock)

    def idle(self) -> bool:
        self.clock.advance(PREPARE)
        return True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Harness:
    """Calls to its executor and its link take time on its clock."""
    executor = SlowExecutor(num_pages=64, page_size=1, next_token=hashed_token(VOCAB))
    harness = Harness(executor=executor)
    executor.clock, wire = harness.clock, harness.wire
    receive, send = wire.receive, wire.send

    def slow_receive(timeout_s: float) -> list[ToEngine]:
        harness.clock.advance(timeout_s * 1e6 + RECEIVE)
        return receive(timeout_s)

    def slow_send(message: ToFrontend) -> None:
        harness.clock.advance(SEND)
        send(message)

    monkeypatch.setattr(wire, "receive", slow_receive)
    monkeypatch.setattr(wire, "send", slow_send)
    return harness


def test_each_part_of_a_turn_gets_its_time(slow: Harness) -> None:
    """Waiting, and what is done meanwhile, counts nowhere: of an idle turn the receiving neither."""
    figures, model = Figures(decode_log_interval=40), SUBMIT + FINISH + RESULT
    slow.submit("a", [1, 2, 3], max_new_tokens=3)
    slow.drain()
    slow.turn(2)
    for record in slow.recorder.records:
        figures.on(record)
    sums = figures.turns
    assert sums["prefill"].num_steps == 1
    assert sums["prefill"].model_s == pytest.approx(model, abs=0.1)
    assert sums["prefill"].link_s == pytest.approx(2 * SEND, abs=0.1)  # announced, and a token
    assert sums["prefill"].turn_s == pytest.approx(model + 2 * SEND, abs=0.1)
    assert sums["decode"].num_steps == 2
    assert sums["decode"].model_s == pytest.approx(2 * model, abs=0.1)
    link_s = 2 * (RECEIVE + SEND) + SEND  # the end is announced, too
    assert sums["decode"].link_s == pytest.approx(link_s, abs=0.1)
    assert sums["decode"].turn_s == pytest.approx(2 * model + link_s, abs=0.1)


def test_a_turn_is_told_once_and_only_if_it_planned_a_step(slow: Harness) -> None:
    slow.submit("a", [1, 2, 3], max_new_tokens=2)
    slow.drain()
    slow.turn(3)
    turns = slow.recorder.of(TurnDone)
    assert [turn.step_id for turn in turns] == [plan.step_id for plan in slow.plans]
    assert [turn.prefill for turn in turns] == [True, False]
    assert all(0 < turn.plan_s < 0.1 for turn in turns)
