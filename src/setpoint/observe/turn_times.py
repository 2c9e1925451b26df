"""Sums up the time of an engine loop's turns by part: the model, messages, planning, everything
else. Reads the engine's records."""

from __future__ import annotations

from setpoint.core.control import TurnSums
from setpoint.core.records import Record, TurnDone


class TurnTimes:
    """Sums over the turns that planned a step, by its kind: "prefill" if it computed any prompt
    tokens, else "decode"."""

    def __init__(self) -> None:
        self.sums = {"prefill": TurnSums(), "decode": TurnSums()}

    def on(self, record: Record) -> None:
        if isinstance(record, TurnDone):
            sums = self.sums["prefill" if record.prefill else "decode"]
            sums.num_steps += 1
            sums.turn_s += record.turn_s
            sums.plan_s += record.plan_s
            sums.model_s += record.model_s
            sums.link_s += record.link_s
