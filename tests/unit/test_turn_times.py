"""The times of a loop's turns: what each part gets, what is waiting, and that nothing is counted
twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from setpoint.core.messages import ToEngine, ToFrontend
from setpoint.core.plan import OWN_LENGTH, PlanBuilder, StepPlan, TokenMasks
from setpoint.core.result import StepResult
from setpoint.launch import turn_times
from setpoint.launch.turn_times import TimedExecutor, TimedLink, TurnTimes

SUBMIT, FINISH, RESULT, RECEIVE, SEND, OTHER, PREPARE = 1000, 200, 100, 10, 20, 3, 7000
"""Seconds of each."""


class Slow:
    """A clock, and an executor, its steps and a link whose calls take time on it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def submit(self, plan: StepPlan) -> Slow:
        self.now += SUBMIT
        return self

    def finish(self, masks: TokenMasks | None) -> None:
        self.now += FINISH

    def result(self) -> StepResult:
        self.now += RESULT
        return StepResult(1, np.zeros(0, np.int64), np.zeros(0, np.int32))

    def idle(self) -> bool:
        self.now += PREPARE
        return True

    def shutdown(self) -> None: ...

    def receive(self, timeout_s: float) -> list[ToEngine]:
        self.now += timeout_s or RECEIVE
        return []

    def send(self, message: ToFrontend) -> None:
        self.now += SEND


def plan_of(*starts: int) -> StepPlan:
    builder = PlanBuilder(0)
    for slot, start in enumerate(starts):
        builder.add_row(slot, slot, start, 1, True)
    return builder.build()


def test_each_part_of_a_turn_gets_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr(turn_times, "time", SimpleNamespace(perf_counter=slow.perf_counter))
    times = TurnTimes()
    executor, link = TimedExecutor(slow, times), TimedLink(slow, times)
    message: Any = None

    def turn(plan: StepPlan | None, wait_s: float = 0.0) -> None:
        times.turn()
        if wait_s:
            assert executor.idle()
        link.receive(wait_s)
        if plan is not None:
            step = executor.submit(plan)
            step.finish(None)
            step.result()
            link.send(message)
        slow.now += OTHER

    turn(None, 5e6)
    turn(plan_of(0, OWN_LENGTH), 5e6)
    turn(plan_of(OWN_LENGTH, OWN_LENGTH))
    turn(plan_of(OWN_LENGTH))
    turn(plan_of())
    times.turn()
    model = SUBMIT + FINISH + RESULT
    assert times.info() == {
        "prefill": {
            "num_steps": 1,
            "turn_s": model + SEND + OTHER,
            "model_s": model,
            "link_s": SEND,
        },
        "decode": {
            "num_steps": 2,
            "turn_s": 2 * (model + RECEIVE + SEND + OTHER),
            "model_s": 2 * model,
            "link_s": 2 * (RECEIVE + SEND),
        },
    }
