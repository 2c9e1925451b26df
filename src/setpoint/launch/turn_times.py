"""Where the turns of an engine's loop spend their time: in the model, in messages, in everything
else.

Stands between the loop and its executor and link, and knows nothing of either. A turn without a
step is not counted, nor is waiting for a message or what is done meanwhile; a turn is "prefill" if
its step computed any prompt tokens, else "decode".
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from setpoint.core.executor import Executor, PendingStep
from setpoint.core.messages import ToEngine, ToFrontend
from setpoint.core.plan import OWN_LENGTH, StepPlan, TokenMasks
from setpoint.core.result import StepResult
from setpoint.scheduler.loop import Link


@dataclass(slots=True)
class Sums:
    """Seconds since the engine started."""

    num_steps: int = 0
    turn_s: float = 0.0
    """All of the turns, waiting excluded."""
    model_s: float = 0.0
    """In the executor: forward passes and sampling."""
    link_s: float = 0.0
    """Receiving, decoding, encoding and sending messages."""


class TurnTimes:
    def __init__(self) -> None:
        self._sums = {"prefill": Sums(), "decode": Sums()}
        self._began = time.perf_counter()
        self.kind = ""
        """Of this turn's step; "" while it has none. Written by the executor's stand-in."""
        self.model_s = self.link_s = self.waited_s = 0.0
        """Of this turn; written by the stand-ins."""

    def turn(self) -> None:
        """A new turn begins."""
        now = time.perf_counter()
        if self.kind:
            sums = self._sums[self.kind]
            sums.num_steps += 1
            sums.turn_s += now - self._began - self.waited_s
            sums.model_s += self.model_s
            sums.link_s += self.link_s
        self._began, self.kind = now, ""
        self.model_s = self.link_s = self.waited_s = 0.0

    def info(self) -> dict[str, Any]:
        """For ``/server_info``."""
        return {kind: asdict(sums) for kind, sums in self._sums.items()}


class TimedLink:
    """Implements ``scheduler.loop.Link``."""

    def __init__(self, link: Link, times: TurnTimes) -> None:
        self._link = link
        self._times = times

    def receive(self, timeout_s: float) -> list[ToEngine]:
        began = time.perf_counter()
        messages = self._link.receive(timeout_s)
        spent = time.perf_counter() - began
        if timeout_s > 0:
            self._times.waited_s += spent
        else:
            self._times.link_s += spent
        return messages

    def send(self, message: ToFrontend) -> None:
        began = time.perf_counter()
        self._link.send(message)
        self._times.link_s += time.perf_counter() - began


class TimedExecutor:
    """Implements ``core.executor.Executor``."""

    def __init__(self, executor: Executor, times: TurnTimes) -> None:
        self._executor = executor
        self._times = times

    def submit(self, plan: StepPlan) -> TimedStep:
        starts = plan.rows.starts
        if len(starts):
            self._times.kind = "decode" if (starts == OWN_LENGTH).all() else "prefill"
        began = time.perf_counter()
        step = TimedStep(self._executor.submit(plan), self._times)
        self._times.model_s += time.perf_counter() - began
        return step

    def idle(self) -> bool:
        began = time.perf_counter()
        more = self._executor.idle()
        self._times.waited_s += time.perf_counter() - began
        return more

    def shutdown(self) -> None:
        self._executor.shutdown()


class TimedStep:
    """Implements ``core.executor.PendingStep``."""

    def __init__(self, step: PendingStep, times: TurnTimes) -> None:
        self._step = step
        self._times = times

    def finish(self, masks: TokenMasks | None) -> None:
        began = time.perf_counter()
        self._step.finish(masks)
        self._times.model_s += time.perf_counter() - began

    def result(self) -> StepResult:
        began = time.perf_counter()
        result = self._step.result()
        self._times.model_s += time.perf_counter() - began
        return result
