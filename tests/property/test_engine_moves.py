"""Requests over engines that die, one event after the other: who is tried and who is blamed, and what
waits when no engine is left. ``test_simulation`` has the faults at any moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.messages import (
    Abort,
    Announce,
    Finish,
    Ready,
    Stop,
    Submit,
    TokenEvent,
    Tokens,
    decode_to_engine,
    encode,
)
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.ipc.client import EngineClient
from setpoint.ipc.engine_life import EngineLives, RestartBudget
from setpoint.ipc.line import EngineLine
from setpoint.ipc.mailbox import Mailbox
from setpoint_testing.fake_engine import SOME_FACTS


def token(request: Request, position: int) -> int:
    return (int(request.prompt()[0]) * 31 + position * 7) % 1000


def request_of(rid: str, rng: random.Random, poison: int | None) -> Request:
    """A request that ends the engine which computes its output ``poison``, if any."""
    ids = [rng.randrange(1000), -1 if poison is None else poison]
    sampling = SamplingParams(max_new_tokens=rng.randrange(1, 12))
    return Request(rid=rid, prompt_ids=pack_ids(ids), sampling=sampling, seed=0)


@dataclass
class Engine:
    """One life of an engine that computes one token of every request in a step."""

    rank: int
    receiver: Callable[[bytes], None] | None = None
    running: dict[int, tuple[Request, int]] = field(default_factory=dict)
    """Number -> the request, and how many outputs it has."""
    ends: set[int] = field(default_factory=set)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.line = EngineLine(self, rank=self.rank)

    def start(self, receiver: Callable[[bytes], None], on_cut: Callable[[], None]) -> None:
        self.receiver = receiver

    def close(self) -> None: ...

    def send(self, data: bytes) -> None:
        match decode_to_engine(data):
            case Submit(number, request):
                assert number not in self.running
                self.running[number] = request, len(request.prior_outputs())
            case Stop(number):
                self.running.pop(number, None)
            case Abort(numbers):
                self.ends.update(numbers)

    def say(self, message: Tokens | Announce | Ready) -> None:
        assert self.receiver is not None
        self.receiver(encode(message))

    def step(self) -> bool:
        """Compute, and say the events. Returns False if a request ends the engine, which says
        nothing then."""
        numbers = list(self.running)
        self.say(Announce({number: self.running[number][0].rid for number in numbers}, []))
        self.num_steps += 1
        for request, num in self.running.values():
            if num == int(request.prompt()[1]):
                return False
        if numbers:
            self.say(Tokens([self._event(number) for number in numbers]))
        self.say(Announce({}, numbers))
        return True

    def _event(self, number: int) -> TokenEvent:
        request, num = self.running[number]
        limit = request.sampling.max_new_tokens
        assert limit is not None
        finish = Finish("abort") if number in self.ends else None
        ids = [] if finish else [token(request, num)]
        if finish is None and num + 1 >= limit:
            finish = Finish("length", length=limit)
        self.running[number] = request, num + len(ids)
        if finish is not None:
            del self.running[number]
        return TokenEvent(number, ids, finish, num_prompt=2, num_outputs=num + len(ids))


@dataclass
class Reader:
    request: Request
    mailbox: Mailbox
    ids: list[int] = field(default_factory=list)
    end: str = ""

    def take(self) -> None:
        events, self.mailbox._events = self.mailbox._events, []
        for index, event in events:
            assert index == 0
            assert not self.end, "nothing comes after the end"
            self.ids += event.ids
            assert event.num_outputs == len(self.ids)
            self.end = event.finish.type if event.finish is not None else ""
        if not self.end and self.mailbox._error is not None:
            error = self.mailbox._error
            self.end = "blamed" if isinstance(error, RequestError) else "dead"


def test_without_further_engines_what_waits_ends_with_the_reason() -> None:
    async def scenario() -> None:
        client = EngineClient(EngineLives(RestartBudget(0)))
        engines = [Engine(0), Engine(1)]
        for engine in engines:
            client.attach(engine.line)
            engine.say(Ready(SOME_FACTS))
        mailbox = Mailbox()
        client.submit(request_of("a", random.Random(0), None), mailbox)
        for engine in engines:
            engine.line.died(f"Engine {engine.rank} is dead.", was_killed=True)
            assert client.num_open == 1
            client.lost(engine.rank, f"Engine {engine.rank} is not started again.")
        with pytest.raises(EngineDeadError, match="Engine 1 is not started again"):
            await mailbox.take()
        with pytest.raises(EngineDeadError):
            client.submit(request_of("b", random.Random(0), None), Mailbox())

    asyncio.run(scenario())


def crashed_under(num: int, guilty: int | None) -> tuple[EngineClient, list[Reader], int, int]:
    """One engine has crashed under ``num`` requests of which ``guilty`` ends engines, and others take
    its place until all have ended: the client, the readers, the steps until all had a token and the
    number of engines."""

    async def scenario() -> tuple[EngineClient, list[Reader], int, int]:
        rng = random.Random(7)
        client = EngineClient(EngineLives(RestartBudget(0)))
        engine = Engine(0)
        client.attach(engine.line)
        engine.say(Ready(SOME_FACTS))
        readers = []
        for index in range(num):
            request = request_of(f"r{index}", rng, 0 if index == guilty else None)
            mailbox = Mailbox()
            client.submit(request, mailbox)
            readers.append(Reader(request, mailbox))
        engine.say(Announce({number: each[0].rid for number, each in engine.running.items()}, []))
        engine.line.died("It is dead.")
        num_steps, num_engines = 0, 1
        while client.num_open:
            engine = Engine(0)
            client.attach(engine.line)
            engine.say(Ready(SOME_FACTS))
            num_engines += 1
            while client.num_open:
                num_steps += any(not each.ids and not each.end for each in readers)
                if not engine.step():
                    engine.line.died("It is dead.")
                    break
                for reader in readers:
                    reader.take()
                await asyncio.sleep(0)
        for reader in readers:
            reader.take()
        return client, readers, num_steps, num_engines

    return asyncio.run(scenario())


def test_after_a_crash_that_no_request_causes_all_go_on_within_a_few_steps() -> None:
    _, readers, num_steps, num_engines = crashed_under(32, None)
    assert all(reader.end == "length" for reader in readers)
    assert num_engines == 2
    assert num_steps == 6, "groups of 1, 2, 4, 8, 16 and 1"


@pytest.mark.parametrize("guilty", [0, 1, 2, 6, 7, 13, 31])
def test_a_guilty_request_is_found_among_many_with_four_crashes(guilty: int) -> None:
    _, readers, _, num_engines = crashed_under(32, guilty)
    assert [reader.end == "blamed" for reader in readers] == [i == guilty for i in range(32)]
    # It ends the first, one that tries it in a group, one that tries it beside those that have
    # shown their innocence, and one that computes nothing else.
    assert num_engines <= 5
