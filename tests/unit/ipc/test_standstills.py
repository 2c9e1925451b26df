"""An engine stands still if it says so after what was last asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from setpoint.core.control import Answer, Call, Done, OperationDone, PauseDone, PauseMode, Refused
from setpoint.core.messages import Alive, Ready, Reply, decode_to_engine, encode
from setpoint.core.operations import MemoryPart
from setpoint.ipc.client import EngineClient
from setpoint.ipc.engine_life import EngineLives, RestartBudget
from setpoint.ipc.line import EngineLine
from setpoint_testing.fake_engine import SOME_FACTS


class Engine:
    """It answers when the test has it answer."""

    def __init__(self, rank: int) -> None:
        self.line = EngineLine(self, rank=rank)
        self.calls: list[Call] = []
        """The calls without an answer, oldest first."""

    def start(self, receiver: Callable[[bytes], None], on_cut: Callable[[], None]) -> None:
        self._receiver = receiver

    def close(self) -> None: ...

    def send(self, data: bytes) -> None:
        call = decode_to_engine(data)
        assert isinstance(call, Call)
        self.calls.append(call)

    def is_ready(self) -> None:
        self._receiver(encode(Ready(SOME_FACTS)))

    def says(self, *, stands_still: bool) -> None:
        self._receiver(encode(Alive(stands_still)))
        if self.line.still_since is not None:
            self.line.still_since -= 1.0

    async def answers(self, answer: Answer) -> str:
        """Answer the oldest call, once it has come; returns its kind."""
        while not self.calls:
            await asyncio.sleep(0)
        call = self.calls.pop(0)
        self._receiver(encode(Reply(call.id, answer)))
        return type(call).__name__


def with_two(scenario: Callable[[EngineClient, Engine, Engine], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        client = EngineClient(EngineLives(RestartBudget(0)))
        first, second = Engine(0), Engine(1)
        for engine in (first, second):
            client.attach(engine.line)
            engine.is_ready()
        await scenario(client, first, second)

    asyncio.run(run())


def stood(client: EngineClient) -> list[str]:
    return [str(each) for each in client.standings() if each.is_still]


def test_what_an_engine_said_while_another_refused_counts_no_more() -> None:
    """Red before: a healthy server said ``stands still`` for a second after a refused flush."""

    async def scenario(client: EngineClient, first: Engine, second: Engine) -> None:
        flushing = asyncio.create_task(client.orders.flush())
        assert await first.answers(Done()) == "Hold"
        first.says(stands_still=True)
        assert await second.answers(Refused("An engine is not idle.")) == "Hold"
        while not (first.calls and second.calls):
            await asyncio.sleep(0)
        first.says(stands_still=True)
        assert stood(client) == [], "it is asked to continue, and has not done it yet"
        assert await first.answers(Done()) == await second.answers(Done()) == "Continue"
        assert not await flushing
        assert stood(client) == []
        first.says(stands_still=True)
        assert stood(client) == ["engine 0: stands still"], "it says so itself"
        first.says(stands_still=False)
        assert stood(client) == []

    with_two(scenario)


def test_an_order_that_has_ended_leaves_nothing_behind() -> None:
    async def scenario(client: EngineClient, first: Engine, second: Engine) -> None:
        orders = client.orders
        told: list[tuple[Coroutine[Any, Any, Any], Answer]] = [
            (orders.pause(PauseMode.IN_PLACE), PauseDone(0)),
            (orders.resume(), Done()),
            (orders.release([MemoryPart.KV_CACHE]), OperationDone(0)),
            (orders.restore([MemoryPart.KV_CACHE]), OperationDone(0)),
        ]
        for order, answer in told:
            doing = asyncio.create_task(order)
            while not doing.done():
                for engine in (first, second):
                    if engine.calls:
                        kind = type(engine.calls[0]).__name__
                        await engine.answers(Done() if kind in ("Hold", "Continue") else answer)
                await asyncio.sleep(0)
            asked = orders.paused or orders.holds_released
            assert len(stood(client)) == (2 if asked else 0)
            for engine in (first, second):
                engine.says(stands_still=bool(asked))

    with_two(scenario)


def test_a_standstill_goes_on_through_an_order() -> None:
    """An engine that an order does not move is missed, however often orders come."""

    async def scenario(client: EngineClient, first: Engine, second: Engine) -> None:
        first.says(stands_still=True)
        assert first.line.still_since is not None
        first.line.still_since -= 3600
        doing = asyncio.create_task(first.line.resume())
        await first.answers(Done())
        await doing
        first.says(stands_still=True)
        standing = client.standings()[0]
        assert standing.is_missed
        assert standing.idle_s > 3600

    with_two(scenario)
