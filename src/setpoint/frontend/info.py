"""What ``/server_info`` tells of one model's service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from setpoint.core.control import EngineFacts, InternalState
from setpoint.frontend.live_settings import LiveSettings
from setpoint.frontend.telemetry.book import RequestBook
from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine


@dataclass(slots=True, frozen=True)
class Info:
    model_name: str
    options: Mapping[str, Any]
    """The resolved options, as at the start."""
    engine: EngineClient
    _live: LiveSettings
    _book: RequestBook

    async def states(self) -> list[tuple[EngineLine, InternalState]]:
        """What each engine that takes requests says of itself, in the order of ranks. Raises
        EngineDeadError without one."""

        async def ask(line: EngineLine) -> tuple[EngineLine, InternalState]:
            return line, await line.get_state()

        return await self.engine.on_all(ask)

    async def now(self) -> dict[str, Any]:
        """The resolved options, what the first engine reported when it was ready, the states of
        all engines now, and how requests ended. Raises EngineDeadError."""
        found = await self.states()
        return {
            "kv_events": None,
            **self.known(found[0][0]),
            "internal_states": [
                _entry(state, line.facts) | {"dp_rank": line.rank} for line, state in found
            ],
            "standby": self.engine.lives.standby,
            "standby_death": self.engine.lives.standby_death,
            "restarts_left": self.engine.lives.restarts.left,
            "ranks": [asdict(each) for each in self.engine.standings()],
            "requests": self._book.info(),
        }

    def known(self, line: EngineLine) -> dict[str, Any]:
        """The part for which the engine of this line need not be asked. start_values: what the
        options that have changed since were at the start."""
        options, live = self.options, self._live.frontend
        engine = msgspec.to_builtins(line.facts)
        decisions = *options.get("decisions", ()), *engine["decisions"], *live.decisions
        changed = {
            name: options[name]
            for name, value in live.options.items()
            if name in options and options[name] != value
        }
        return {
            **options,
            **engine,
            **live.options,
            "start_values": changed,
            "decisions": list(decisions),
        }


def _entry(state: InternalState, facts: EngineFacts) -> dict[str, Any]:
    """The entry of an engine in SGLang's ``internal_states``: what it says of itself, with SGLang's
    names for what it has elsewhere."""
    entry: dict[str, Any] = msgspec.to_builtins(state)
    for key in ("type", "report"):
        del entry[key]
    report = msgspec.to_builtins(state.report)
    capacity = {"token_capacity": facts.max_total_num_tokens}
    return {
        **entry,
        **report.pop("figures"),
        **{name: value for name, value in report.items() if value is not None},
        "effective_max_running_requests_per_dp": state.settings.max_running_requests,
        "memory_usage": {**report["memory_usage"], **capacity},
    }
