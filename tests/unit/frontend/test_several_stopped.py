"""An engine that a signal stops while its model is being loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from setpoint.core.awake import CLOCK
from setpoint.core.control import Operate, OperationDone
from setpoint.core.messages import Ready, Reply, decode_to_engine, encode
from setpoint.core.operations import ReleaseMemory, RestoreMemory
from setpoint.frontend.multi_model import models
from setpoint.frontend.multi_model.models import ModelSwapper
from setpoint.ipc.client import EngineClient
from setpoint.ipc.engine_life import EngineLives, RestartBudget
from setpoint.ipc.line import EngineLine
from setpoint_testing.fake_engine import SOME_FACTS


class Engine:
    """Gives its memory back, and is stopped before it takes it again."""

    def __init__(self) -> None:
        self.line = EngineLine(self)

    def start(self, receiver: Callable[[bytes], None], on_cut: Callable[[], None]) -> None:
        self.receiver = receiver

    def close(self) -> None: ...

    def send(self, data: bytes) -> None:
        match decode_to_engine(data):
            case Operate(number, ReleaseMemory()):
                answer = encode(Reply(number, OperationDone(0, "")))
                asyncio.get_running_loop().call_soon(self.receiver, answer)
            case Operate(_, RestoreMemory()):
                asyncio.get_running_loop().call_soon(self.line.suspended, True)

    def is_ready(self) -> None:
        self.receiver(encode(Ready(SOME_FACTS)))


def test_an_engine_that_is_stopped_while_it_takes_its_memory_again_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red before: the load waited an hour for it, and nobody else got the room."""
    monkeypatch.setattr(models, "STOPPED_S", 0.01)

    async def scenario() -> None:
        stopped, following, may_load = Engine(), Engine(), asyncio.Event()
        client = EngineClient(EngineLives(RestartBudget(0)))
        client.attach(stopped.line)
        stopped.is_ready()
        several = ModelSwapper({"a": (client, may_load)}, most=1, clock=CLOCK)
        model = several.models["a"]
        several.loaded("a")
        await several.unload("a")
        working = asyncio.create_task(several.run())
        loading = asyncio.create_task(model.load())
        await stopped.line.dead.wait()
        assert "SIGSTOP" in stopped.line.life.death
        assert may_load.is_set()
        client.attach(following.line)
        following.is_ready()
        await loading
        assert model.state == "loaded"
        working.cancel()

    asyncio.run(scenario())
