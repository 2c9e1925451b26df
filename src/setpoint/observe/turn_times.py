"""Sums up where the turns of an engine's loop spend their time: in the model, in messages, in
planning, in everything else. A reader of the stream of records."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from setpoint.core.records import Record, TurnDone


@dataclass(slots=True)
class Sums:
    """Seconds since the engine started (see ``TurnDone``)."""

    num_steps: int = 0
    turn_s: float = 0.0
    plan_s: float = 0.0
    model_s: float = 0.0
    link_s: float = 0.0


class TurnTimes:
    """Sums of the turns that planned a step: "prefill" if the step computed any prompt tokens, else
    "decode"."""

    def __init__(self) -> None:
        self._sums = {"prefill": Sums(), "decode": Sums()}

    def on(self, record: Record) -> None:
        if isinstance(record, TurnDone):
            sums = self._sums["prefill" if record.prefill else "decode"]
            sums.num_steps += 1
            sums.turn_s += record.turn_s
            sums.plan_s += record.plan_s
            sums.model_s += record.model_s
            sums.link_s += record.link_s

    def info(self) -> dict[str, Any]:
        """The sums for ``/server_info``."""
        return {kind: asdict(sums) for kind, sums in self._sums.items()}
