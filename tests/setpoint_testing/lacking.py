"""A scripted executor whose device has too little memory for some steps."""

from __future__ import annotations

from typing import Any

from setpoint.core.errors import StepOutOfMemoryError
from setpoint.core.lack import Lack
from setpoint.core.plan import StepPlan, TokenMasks
from setpoint_testing.harness import VOCAB
from setpoint_testing.scripted import ScriptedExecutor, ScriptedStep, hashed_token

GIB = 1 << 30


class Lacking(ScriptedExecutor):
    """Loses some steps: "before" they begin, in their "forward" pass, whose keys and values are
    then worth nothing, or in their "sampling"."""

    def __init__(self, lost: set[int], where: str, *, is_final: bool = False, **sizes: Any) -> None:
        super().__init__(next_token=hashed_token(VOCAB), **sizes)
        self.lost, self.where, self.is_final = lost, where, is_final

    def error(self) -> StepOutOfMemoryError:
        lack = Lack("out of memory. Tried to allocate 2.00 GiB", 2 * GIB, 80 * GIB)
        return StepOutOfMemoryError(lack, is_final=self.is_final)

    def submit(self, plan: StepPlan) -> ScriptedStep:
        is_lost = plan.step_id in self.lost
        if is_lost and self.where == "before":
            raise self.error()
        step = super().submit(plan)
        if is_lost:
            # What was written of the step is worth nothing.
            self._spoil(plan)
            if self.where == "forward":
                raise self.error()
            step.finish = self._fail  # type: ignore[method-assign]
        return step

    def _spoil(self, plan: StepPlan) -> None:
        for slot, start, count in zip(
            plan.rows.slots.tolist(),
            plan.rows.starts.tolist(),
            plan.rows.counts.tolist(),
            strict=True,
        ):
            begin = len(self._ids[slot]) - 1 if start < 0 else start
            self.store[self._where(slot, 0, begin, begin + count)] = -7

    def _fail(self, masks: TokenMasks | None) -> None:
        raise self.error()
