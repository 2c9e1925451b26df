"""The times of a loop's turns: what each part gets, what is waiting, and that nothing is counted twice."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from setpoint.core.messages import ToEngine, ToFrontend
from setpoint.core.plan import OWN_LENGTH, PlanBuilder, StepPlan, TokenMasks
from setpoint.core.result import StepResult
from setpoint.launch.turn_times import TimedExecutor, TimedLink, TurnTimes

NO_IDS = np.zeros(0, np.int32)


class Slow:
    """An executor, its steps and a link, each call of which takes a while."""

    def __init__(self) -> None:
        self.received: list[ToEngine] = []

    def submit(self, plan: StepPlan) -> Slow:
        time.sleep(0.01)
        return self

    def finish(self, masks: TokenMasks | None) -> None:
        time.sleep(0.002)

    def result(self) -> StepResult:
        time.sleep(0.001)
        return StepResult(1, NO_IDS.astype(np.int64), NO_IDS)

    def shutdown(self) -> None: ...

    def receive(self, timeout_s: float) -> list[ToEngine]:
        time.sleep(timeout_s or 0.001)
        return self.received

    def send(self, message: ToFrontend) -> None:
        time.sleep(0.001)


def plan_of(*starts: int) -> StepPlan:
    builder = PlanBuilder(0)
    for slot, start in enumerate(starts):
        builder.add_row(slot, slot, start, 1, True)
    return builder.build()


def test_each_part_of_a_turn_gets_its_time() -> None:
    times = TurnTimes()
    executor, link = TimedExecutor(Slow(), times), TimedLink(Slow(), times)
    message: Any = None

    def turn(plan: StepPlan | None, wait_s: float = 0.0) -> None:
        times.turn()
        assert link.receive(wait_s) == []
        if plan is not None:
            step = executor.submit(plan)
            step.finish(None)
            step.result()
            link.send(message)
            time.sleep(0.004)

    turn(None, 0.05)
    turn(plan_of(0, OWN_LENGTH), 0.05)
    turn(plan_of(OWN_LENGTH, OWN_LENGTH))
    turn(plan_of(OWN_LENGTH))
    turn(plan_of())
    times.turn()
    prefill, decode = times.info()["prefill"], times.info()["decode"]
    assert (prefill["num_steps"], decode["num_steps"]) == (1, 2)
    assert prefill["link_s"] == pytest.approx(0.001, abs=0.001)
    assert decode["link_s"] == pytest.approx(0.004, abs=0.003)
    assert decode["model_s"] == pytest.approx(0.026, abs=0.008)
    assert 0.017 <= prefill["turn_s"] < 0.05, "waiting is not part of it"
    for sums in (prefill, decode):
        assert sums["turn_s"] - sums["model_s"] - sums["link_s"] == pytest.approx(0.004 * sums["num_steps"], abs=0.003)
