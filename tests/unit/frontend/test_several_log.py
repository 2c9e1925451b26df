"""What the log says of several models."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from setpoint.frontend.multi_model.models import TURN_S, ModelSwapper


def test_the_log_says_for_whom_new_requests_wait(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimpleNamespace(time_s=0.0)
    clock.now = lambda: clock.time_s
    client: Any = SimpleNamespace(gate=None)

    async def scenario() -> None:
        parts = {name: (client, asyncio.Event()) for name in "ab"}
        several = ModelSwapper(parts, most=1, clock=clock)
        first, second = several.models.values()
        several.loaded("a")
        several.loaded("b")
        several.planner.unloaded("b")
        assert first.arrived()
        assert not second.arrived()
        working = asyncio.create_task(several.run())
        await asyncio.sleep(0)
        assert not caplog.messages
        clock.time_s = TURN_S
        assert first.arrived()
        several.wake()
        while not caplog.messages:
            await asyncio.sleep(0)
        working.cancel()

    with caplog.at_level("INFO", "setpoint"):
        asyncio.run(scenario())
    assert caplog.messages == [
        "Model b has been wanted for 5.0 s while all loaded models have requests. New requests of"
        " model a wait from now on, and it is unloaded as soon as its 2 open ones end."
    ]
