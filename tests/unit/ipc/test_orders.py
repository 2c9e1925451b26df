"""What engines are told that were starting, stopped or different when something was decided for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from setpoint.core.control import (
    PAUSED,
    Answer,
    Call,
    Change,
    Continue,
    Done,
    Hold,
    Operate,
    OperationDone,
    Pause,
    PauseDone,
    PauseMode,
    Refused,
)
from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.messages import Ready, Reply, decode_to_engine, encode
from setpoint.core.operations import (
    AttachStorage,
    DetachStorage,
    LoadWeights,
    MemoryPart,
    ReleaseMemory,
    RestoreMemory,
    StartProfile,
    StopProfile,
)
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.core.settings import Settings
from setpoint.frontend.participants import Participants
from setpoint.ipc.client import EngineClient
from setpoint.ipc.engine_life import EngineLives, RestartBudget
from setpoint.ipc.line import EngineLine
from setpoint.ipc.mailbox import Mailbox
from setpoint_testing.fake_engine import SOME_FACTS

WEIGHTS = LoadWeights("step-1", "auto", flush_cache=True)


@dataclass
class Engine:
    """It answers calls at once, except those that it refuses or never answers."""

    rank: int
    refuses: bool = False
    is_silent: bool = False
    is_busy: bool = False
    """It has requests that no pause holds up."""
    got: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.line = EngineLine(self, rank=self.rank)

    def start(self, receiver: Callable[[bytes], None], on_cut: Callable[[], None]) -> None:
        self.receiver = receiver

    def close(self) -> None: ...

    def send(self, data: bytes) -> None:
        message = decode_to_engine(data)
        match message:
            case Pause(mode=mode):
                self.got.append(f"Pause {mode}")
            case Operate(operation=ReleaseMemory() | RestoreMemory() as operation):
                self.got.append(" ".join((type(operation).__name__, *operation.parts)))
            case _:
                self.got.append(type(message).__name__)
        if isinstance(message, Change) and self.rank:
            return  # its reply is the test's
        if isinstance(message, Pause | Hold | Continue | Operate | Change) and not self.is_silent:
            reply = Reply(message.id, self._answer(message))
            asyncio.get_running_loop().call_soon(self.receiver, encode(reply))

    def _answer(self, call: Call) -> Answer:
        match call:
            case Pause():
                return PauseDone(0)
            case Hold() | Operate() if self.is_busy:
                return Refused("An engine is not idle.")
            case Operate() if self.refuses:
                return Refused("It has no memory.")
            case Operate():
                return OperationDone(0, "")
        return Done()

    def is_ready(self) -> None:
        self.receiver(encode(Ready(SOME_FACTS)))


def client_of(*engines: Engine, in_step: bool = False) -> EngineClient:
    client = EngineClient(EngineLives(RestartBudget(0), in_step=in_step))
    for engine in engines:
        client.attach(engine.line)
    engines[0].is_ready()
    return client


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_an_engine_that_was_starting_loads_the_weights_before_its_first_request() -> None:
    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(first, second)
        await client.orders.load(WEIGHTS)
        first.line.died("It is dead.")
        sampling = SamplingParams(max_new_tokens=1)
        client.submit(
            Request(rid="a", prompt_ids=pack_ids([1]), sampling=sampling, seed=0), Mailbox()
        )
        second.is_ready()
        assert second.got == ["Pause retract", "Operate", "Continue", "Submit"]
        next_one = Engine(0)
        client.attach(next_one.line)
        next_one.is_ready()
        assert next_one.got == [], "its job has them"

    asyncio.run(scenario())


def test_an_engine_that_was_stopped_loads_the_weights_when_it_continues() -> None:
    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(first, second)
        second.is_ready()
        second.line.suspended(True)
        await client.orders.load(WEIGHTS)
        await client.orders.pause(PauseMode.ABORT)
        second.line.suspended(False)
        assert second.got == ["Pause retract", "Operate", "Pause abort"]

    asyncio.run(scenario())


def test_engines_in_step_take_requests_only_together() -> None:
    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(first, second, in_step=True)
        second.is_ready()
        assert client.is_ready
        second.line.suspended(True)
        assert not client.is_ready
        assert [each.state for each in client.standings()] == ["ready", "stopped"]
        sampling = SamplingParams(max_new_tokens=1)
        client.submit(
            Request(rid="a", prompt_ids=pack_ids([1]), sampling=sampling, seed=0), Mailbox()
        )
        assert "Submit" not in first.got + second.got
        second.line.suspended(False)
        assert client.is_ready
        assert (first.got + second.got).count("Submit") == 1

    asyncio.run(scenario())


def test_an_engine_that_cannot_load_what_it_has_missed_ends() -> None:
    async def scenario() -> None:
        first, second = Engine(0), Engine(1, refuses=True)
        client = client_of(first, second)
        await client.orders.load(WEIGHTS)
        second.is_ready()
        await turns()
        assert second.line.life.has_ended
        assert "It has no memory." in second.line.life.death
        assert first.line.life.is_ready

    asyncio.run(scenario())


def test_weights_that_one_engine_refuses_are_kept_by_none() -> None:
    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(first, second)
        second.is_ready()
        await client.orders.load(WEIGHTS)
        second.refuses = True
        first.got.clear()
        with pytest.raises(RequestError, match="no memory"):
            await client.orders.load(LoadWeights("step-2", "auto", flush_cache=True))
        assert first.got == ["Operate", "Pause retract", "Operate", "Continue"], "step-1 again"
        assert client.is_ready

    asyncio.run(scenario())


def test_weights_of_the_start_come_back_with_the_next_engine() -> None:
    async def scenario() -> None:
        first, second = Engine(0), Engine(1, refuses=True)
        client = client_of(first, second)
        second.is_ready()
        with pytest.raises(RequestError, match="no memory"):
            await client.orders.load(WEIGHTS)
        assert first.line.life.has_ended
        assert second.line.life.is_ready

    asyncio.run(scenario())


def test_a_pause_that_fails_takes_back_no_other_pause_and_no_end_of_one() -> None:
    async def scenario() -> None:
        first, second, third = Engine(0), Engine(1), Engine(2)
        client = client_of(first, second, third)
        second.is_ready()
        third.is_ready()
        orders = client.orders
        await orders.pause(PauseMode.IN_PLACE, [1, 2])
        first.is_silent = third.is_silent = True
        pausing = asyncio.create_task(orders.pause(PauseMode.RETRACT))
        await turns()
        assert orders.paused == dict.fromkeys(range(3), PauseMode.RETRACT)
        await orders.resume([1])
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        assert orders.paused == {2: PauseMode.IN_PLACE}
        assert first.got[-1] == "Continue"
        assert second.got[-1] == "Continue"
        assert third.got[-1] == "Pause in_place"

    asyncio.run(scenario())


def test_an_engine_that_was_starting_releases_the_memory_that_the_others_have_released() -> None:
    """Red before: it computed, while a client believed that all memory was free."""

    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(first, second)
        await client.orders.release([MemoryPart.KV_CACHE, MemoryPart.WEIGHTS])
        second.is_ready()
        assert second.got == ["Pause retract", "ReleaseMemory kv_cache weights", "Continue"]
        await client.orders.restore([MemoryPart.KV_CACHE])
        assert second.got[-1] == "RestoreMemory kv_cache"
        first.line.died("It is dead.")
        next_one = Engine(0)
        client.attach(next_one.line)
        next_one.is_ready()
        assert next_one.got == ["Pause retract", "ReleaseMemory weights", "Continue"]
        await client.orders.load(WEIGHTS)
        last = Engine(1)
        second.line.died("It is dead, too.")
        client.attach(last.line)
        last.is_ready()
        assert last.got == [], "loading has restored the weights"

    asyncio.run(scenario())


def test_an_engine_that_was_stopped_takes_its_memory_again_when_it_continues() -> None:
    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(first, second)
        second.is_ready()
        await client.orders.release([MemoryPart.WEIGHTS])
        second.line.suspended(True)
        await client.orders.restore([MemoryPart.WEIGHTS])
        second.got.clear()
        second.line.suspended(False)
        assert second.got == ["Pause retract", "RestoreMemory weights", "Continue"]

    asyncio.run(scenario())


def test_memory_that_one_engine_does_not_release_is_released_by_none() -> None:
    async def scenario() -> None:
        first, second = Engine(0), Engine(1, refuses=True)
        client = client_of(first, second)
        second.is_ready()
        with pytest.raises(RequestError, match="no memory"):
            await client.orders.release([MemoryPart.WEIGHTS])
        assert first.got == [
            "Hold",
            "ReleaseMemory weights",
            "RestoreMemory weights",
            "Continue",
        ]
        assert client.is_ready

    asyncio.run(scenario())


# ------------------------------------------------------------------ engines that are being born


def mailed(client: EngineClient, rid: str = "a") -> Mailbox:
    mailbox, sampling = Mailbox(), SamplingParams(max_new_tokens=1)
    client.submit(Request(rid=rid, prompt_ids=pack_ids([1]), sampling=sampling, seed=0), mailbox)
    return mailbox


def reborn(client: EngineClient, engine: Engine) -> Engine:
    """The engine is killed, and the next one of its rank starts."""
    engine.line.died("It is dead.")
    following = Engine(engine.rank)
    client.attach(following.line)
    return following


def test_work_that_holds_all_engines_leaves_no_pause_behind() -> None:
    """Red before: an engine that was starting when an update began stayed paused for ever."""

    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(second, first)
        first.is_ready()
        first = reborn(client, first)
        async with client.orders.held():
            await client.orders.load(WEIGHTS)
            assert client.orders.paused == {0: PauseMode.ABORT, 1: PauseMode.ABORT}
            first.is_ready()
            assert first.got == ["Pause retract", "Operate", "Pause abort"]
        assert client.orders.paused == {}
        assert first.got[-1] == second.got[-1] == "Continue"
        following = reborn(client, second)
        following.is_ready()
        assert following.got == []

    asyncio.run(scenario())


def test_pauses_that_begin_or_end_while_engines_are_held() -> None:
    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(first, second)
        second.is_ready()
        orders = client.orders
        await orders.pause(PauseMode.IN_PLACE)
        async with orders.held():
            await orders.resume([0])
            assert first.got[-1] == "Pause abort", "the work goes on"
        assert orders.paused == {1: PauseMode.IN_PLACE}
        assert first.got[-1] == "Continue"
        assert second.got[-1] == "Pause in_place"
        async with orders.held():
            await orders.pause(PauseMode.RETRACT, [0])
        assert orders.paused == {0: PauseMode.RETRACT, 1: PauseMode.IN_PLACE}
        await orders.resume()
        async with orders.held(keep_pause=True):
            pass
        assert orders.paused == {0: PauseMode.ABORT, 1: PauseMode.ABORT}
        await orders.resume()
        async with orders.at_rest(flushes=False, keep_pause=True):
            pass
        assert orders.paused == {0: PauseMode.RETRACT, 1: PauseMode.RETRACT}
        await orders.resume()
        with pytest.raises(RequestError):
            async with orders.held(keep_pause=True):
                raise RequestError("The weights cannot be read.")
        assert orders.paused == {}

    asyncio.run(scenario())


def test_orders_that_find_no_engine_hold_for_the_next_one() -> None:
    """Red before: 503, and a pause that was to end stayed."""

    async def scenario() -> None:
        engine = Engine(0)
        client = client_of(engine)
        engine = reborn(client, engine)
        waits = mailed(client)
        assert await client.orders.pause(PauseMode.ABORT) == 0
        (event,) = await waits.take()
        assert event[1].finish is not None
        assert event[1].finish.message == PAUSED
        engine.is_ready()
        assert engine.got == ["Pause abort"]
        engine = reborn(client, engine)
        await client.orders.resume()
        engine.is_ready()
        assert engine.got == []
        client.shutdown()
        with pytest.raises(EngineDeadError):
            await client.orders.pause(PauseMode.ABORT)

    asyncio.run(scenario())


def test_a_request_does_not_outlive_the_pause_that_ends_it() -> None:
    """Red before: its engine died before it knew, and the next one went on with it."""

    async def scenario() -> None:
        engine = Engine(0)
        client = client_of(engine)
        box = mailed(client)
        client.abort("a")
        reborn(client, engine)
        ((_, event),) = await box.take()
        assert event.finish is not None
        assert event.finish.type == "abort"
        assert client.num_open == 0

    asyncio.run(scenario())


def test_a_storage_is_that_of_the_next_engine_too() -> None:
    attach = AttachStorage("file", "")

    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(first, second)
        await client.orders.use_storage(attach)
        assert client.orders.storage == attach, "for the job of an engine that starts now"
        second.is_ready()
        assert second.got == ["Operate"]
        following = reborn(client, second)
        following.is_ready()
        assert following.got == [], "its job has it"
        await client.orders.use_storage(DetachStorage())
        assert client.orders.storage == DetachStorage()

    asyncio.run(scenario())


def test_an_engine_that_refuses_settings_that_it_has_missed_ends() -> None:
    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(first, second)
        await client.orders.change(
            Settings(max_running_requests=3),
            [],
            before=Settings(max_running_requests=1),
            by="me",
            why="",
        )
        second.is_ready()
        assert second.got == ["Change"]
        second.receiver(encode(Reply(1, Refused("It does not fit.", 500))))
        assert second.line.life.has_ended

    asyncio.run(scenario())


def test_a_profile_is_of_those_that_were_there_when_it_began() -> None:
    """Red before: its end was refused, because an engine that had come later had none."""

    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(first, second)
        second.is_ready()
        profiled = Participants(client)
        await profiled.begin(
            lambda line: line.operate(StartProfile("file")),
            undo=lambda line: line.operate(StopProfile()),
        )
        following = reborn(client, first)
        following.is_ready()
        assert len(await profiled.on_all(lambda line: line.operate(StopProfile()))) == 1
        assert following.got == []
        assert profiled.losses() == " Engine 0 has ended since the start, and its part is lost."
        second.refuses = True
        with pytest.raises(RequestError):
            await profiled.begin(
                lambda line: line.operate(StartProfile("file")),
                undo=lambda line: line.operate(StopProfile()),
            )
        assert following.got == ["Operate", "Operate"], "begun, and ended again"

    asyncio.run(scenario())


# ------------------------------------------------------------------ orders that one engine refuses


@pytest.mark.parametrize("busy", [0, 1])
def test_weights_are_loaded_by_none_if_one_has_requests(busy: int) -> None:
    """Red before: the idle engine loaded them and was ended, because engines must agree."""

    async def scenario() -> None:
        engines = [Engine(0), Engine(1)]
        client = client_of(*engines)
        engines[1].is_ready()
        engines[busy].is_busy = True
        with pytest.raises(RequestError, match="not idle"):
            async with client.orders.at_rest(flushes=True):
                await client.orders.load(WEIGHTS)
        assert [each.got for each in engines] == [["Hold", "Continue"]] * 2
        assert client.orders.paused == {}
        engines[busy].is_busy = False
        async with client.orders.at_rest(flushes=True):
            box = mailed(client)  # it waits in the engine that gets it
            await client.orders.load(WEIGHTS)
        assert sorted(each.got[2:] for each in engines) == [
            ["Hold", "Operate", "Continue"],
            ["Hold", "Submit", "Operate", "Continue"],
        ]
        box.fail(EngineDeadError("The test is over."))

    asyncio.run(scenario())


def test_memory_is_released_and_caches_are_flushed_by_none_if_one_has_requests() -> None:
    """Red before: the idle engine gave its memory back and took it again, or had an empty cache."""

    async def scenario() -> None:
        first, second = Engine(0), Engine(1, is_busy=True)
        client = client_of(first, second)
        second.is_ready()
        with pytest.raises(RequestError, match="not idle"):
            await client.orders.release([MemoryPart.KV_CACHE])
        assert not await client.orders.flush()
        assert first.got == second.got == ["Hold", "Continue"] * 2

    asyncio.run(scenario())


def test_pauses_that_begin_while_engines_are_at_rest() -> None:
    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(first, second)
        second.is_ready()
        orders = client.orders
        await orders.pause(PauseMode.IN_PLACE, [0])
        async with orders.at_rest(flushes=False):
            await orders.pause(PauseMode.ABORT, [1])
        assert first.got == ["Pause in_place", "Hold"], "it stays as it is"
        assert second.got == ["Hold", "Pause abort"]
        async with orders.at_rest(flushes=False):
            await orders.resume()
        assert first.got[-1] == second.got[-1] == "Continue"

    asyncio.run(scenario())


def test_an_engine_that_is_born_while_the_others_are_at_rest_waits_too() -> None:
    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(first, second)
        async with client.orders.at_rest(flushes=True):
            second.is_ready()
            await client.orders.load(WEIGHTS)
        assert second.got == ["Pause retract", "Operate", "Continue"]

    asyncio.run(scenario())


def test_an_engine_that_is_held_and_paused_before_its_answer_goes_on_with_the_pauses_end() -> None:
    async def scenario() -> None:
        first, second = Engine(0), Engine(1, is_silent=True)
        client = client_of(first, second)
        second.is_ready()

        async def flush() -> bool:
            return await client.orders.flush()

        flushing = asyncio.create_task(flush())
        await turns()
        pausing = asyncio.create_task(client.orders.pause(PauseMode.ABORT))
        await turns()
        second.receiver(encode(Reply(1, Refused("An engine is not idle."))))
        second.receiver(encode(Reply(2, PauseDone(0))))
        second.is_silent = False
        await pausing
        assert not await flushing
        assert second.got == ["Hold", "Pause abort"]
        await client.orders.resume()
        assert second.got[-1] == "Continue"

    asyncio.run(scenario())


@pytest.mark.parametrize("aborts", [True, False])
def test_an_order_holds_although_an_engine_dies_before_it_goes_on(aborts: bool) -> None:
    """Red before: the client was told of a failure, and the next engine had the new weights."""

    async def scenario() -> None:
        first, second = Engine(0), Engine(1)
        client = client_of(first, second)
        orders = client.orders
        async with orders.held() if aborts else orders.at_rest(flushes=True):
            await orders.load(WEIGHTS)
            first.is_silent = True
            asyncio.get_running_loop().call_later(0.01, first.line.died, "It is dead.")
        second.is_ready()
        assert second.got == ["Pause retract", "Operate", "Continue"]

    asyncio.run(scenario())
