"""Changes of live options, one at a time: in the engines first, then in the frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from setpoint.core.errors import ConfigError, RequestError
from setpoint.frontend.live_options import FrontendSettings, LiveOptions, Proposal
from setpoint.ipc.client import EngineClient


@dataclass(slots=True, frozen=True)
class LiveSettings:
    """The options of one model that may change while it serves."""

    _engine: EngineClient
    options: LiveOptions
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def frontend(self) -> FrontendSettings:
        """The present settings of the frontend."""
        return self.options.frontend

    async def change(self, values: Mapping[str, Any], *, by: str, why: str = "") -> Proposal:
        """Change options while requests run, all between the same two steps. ``by`` and ``why`` are
        written to the log. Changes are made one at a time.

        Raises RequestError (400) for a change that cannot be made, with nothing changed;
        EngineDeadError.
        """
        async with self._lock:
            try:
                proposal = self.options.propose(values)
            except ConfigError as error:
                raise RequestError(str(error)) from None
            if proposal.options:
                settings, options = proposal.settings, proposal.options
                before = self.options.propose({}).settings
                await self._engine.orders.change(settings, options, before=before, by=by, why=why)
            proposal.accept()
        return proposal
