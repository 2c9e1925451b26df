"""Requests over several engines that die at any moment, in any order of events: every reader gets
the tokens of an undisturbed run, none twice, and a request that ends engines ends alone."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
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
from setpoint.ipc.balance import Balance, RoundRobin, TotalRequests, TotalTokens
from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine
from setpoint.ipc.mailbox import Mailbox
from setpoint.ipc.suspects import MOST_CRASHES, MOST_KILLS
from setpoint.testing.fake_engine import SOME_FACTS

BALANCES: list[Callable[[], Balance]] = [RoundRobin, TotalRequests, TotalTokens]


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

    def step(self, num_said: int | None = None) -> bool:
        """Compute; say the events of the first ``num_said``, of all if None. Returns False if a
        request ends the engine, which says nothing then."""
        numbers = list(self.running)
        self.say(Announce({number: self.running[number][0].rid for number in numbers}, []))
        self.num_steps += 1
        for request, num in self.running.values():
            if num == int(request.prompt()[1]):
                return False
        events = [self._event(number) for number in numbers[:num_said]]
        if events:
            self.say(Tokens(events))
        if num_said is None:
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

    @property
    def poison(self) -> int | None:
        """The output whose computation ends an engine, if it is ever computed."""
        at = int(self.request.prompt()[1])
        limit = self.request.sampling.max_new_tokens
        return at if limit is not None and 0 <= at < limit else None

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


class Server:
    """The real client, and engines that somebody starts again."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.client = EngineClient(balance=rng.choice(BALANCES)(), recovers=True)
        self.engines: list[Engine | None] = [None] * rng.randrange(1, 4)
        self.readers: dict[int, Reader] = {}
        self.seen: Counter[str] = Counter()
        self.deaths: Counter[tuple[str, int]] = Counter()
        """(rid, outputs that its reader had) -> how many engines ended while they had it."""
        for rank in range(len(self.engines)):
            self.attach(rank)
        self.ready(0)

    def attach(self, rank: int) -> None:
        engine = self.engines[rank] = Engine(rank)
        self.client.attach(engine.line)

    def ready(self, rank: int) -> None:
        engine = self.engines[rank]
        if engine is None:
            self.attach(rank)
        elif not engine.line.is_ready:
            engine.say(Ready(SOME_FACTS))

    def submit(self) -> None:
        rng = self.rng
        poison = rng.randrange(8) if rng.random() < 0.03 else None
        request = request_of(f"r{len(self.readers)}", rng, poison)
        mailbox = Mailbox()
        self.readers[self.client.submit(request, mailbox)] = Reader(request, mailbox)

    def step(self, rank: int) -> None:
        engine = self.engines[rank]
        if engine is not None and engine.line.is_ready and not engine.step():
            self.die(rank)

    def cut(self, rank: int) -> None:
        """The engine ends in the middle of what it says of a step."""
        engine = self.engines[rank]
        if engine is not None and engine.line.is_ready:
            engine.step(self.rng.randrange(len(engine.running) + 1))
            self.die(rank, was_killed=True)

    def die(self, rank: int, *, was_killed: bool = False) -> None:
        engine = self.engines[rank]
        if engine is not None:
            self.engines[rank] = None
            self.take()
            num_had = {each.request.rid: len(each.ids) for each in self.readers.values()}
            self.deaths.update((each.rid, num_had[each.rid]) for each, _ in engine.running.values())
            self.seen["killed" if was_killed else "crashed"] += 1
            engine.line.died("It is dead.", was_killed=was_killed)

    def stop(self) -> None:
        open_ones = [number for number, each in self.readers.items() if not each.end]
        if open_ones:
            number = self.rng.choice(open_ones)
            self.readers[number].take()
            self.client.stop(number)
            self.readers[number].end = self.readers[number].end or "stopped"

    def abort(self) -> None:
        self.client.abort(f"r{self.rng.randrange(len(self.readers) + 1)}")

    def act(self) -> None:
        rng, rank = self.rng, self.rng.randrange(len(self.engines))
        match rng.choices(
            ["submit", "step", "ready", "cut", "stop", "abort"], [8, 20, 4, 1, 1, 0.3]
        )[0]:
            case "submit":
                self.submit()
            case "step":
                self.step(rank)
            case "ready":
                self.ready(rank)
            case "cut":
                self.cut(rank)
            case "stop":
                self.stop()
            case _:
                self.abort()

    def take(self) -> None:
        for reader in self.readers.values():
            reader.take()

    def check(self) -> None:
        """Each reader has what an undisturbed run would have given it so far."""
        for reader in self.readers.values():
            expected = [token(reader.request, position) for position in range(12)]
            limit = reader.request.sampling.max_new_tokens
            assert limit is not None
            assert reader.ids == expected[: len(reader.ids)]
            if reader.end == "length":
                assert len(reader.ids) == limit
            if reader.end == "blamed":
                died = self.deaths[reader.request.rid, len(reader.ids)]
                is_guilty = reader.poison == len(reader.ids)
                assert died >= (MOST_CRASHES if is_guilty else MOST_KILLS)
            assert reader.end != "dead"

    async def drain(self) -> None:
        """Start every engine again until all requests have ended."""
        for _ in range(2000):
            for rank in range(len(self.engines)):
                self.ready(rank)
                self.step(rank)
            self.take()
            await asyncio.sleep(0)
            if not self.client.num_open:
                return
        raise AssertionError("requests remain open for ever")


async def run_seed(seed: int) -> Counter[str]:
    server = Server(random.Random(seed))
    for _ in range(150):
        server.act()
        await asyncio.sleep(0)
        server.take()
    await server.drain()
    server.check()
    assert server.client.num_waiting == 0
    server.seen.update(reader.end for reader in server.readers.values())
    server.seen["moved"] += server.client.num_moved
    return server.seen


def test_requests_survive_their_engines() -> None:
    seen: Counter[str] = Counter()
    for seed in range(400):
        try:
            seen.update(asyncio.run(run_seed(seed)))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    # The traces must exercise what they claim to.
    print(seen)
    assert min(seen[name] for name in ("killed", "crashed", "moved", "blamed", "length")) > 50
    assert seen[""] == 0


def test_without_further_engines_what_waits_ends_with_the_reason() -> None:
    async def scenario() -> None:
        client = EngineClient(recovers=True)
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
        client = EngineClient(recovers=True)
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
