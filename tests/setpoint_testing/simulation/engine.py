"""A simulated engine process: the real loop, scheduler, cache and heartbeat around a scripted model,
run turn by turn as callbacks of the virtual loop.

Its tokens follow from the sequence and its seed alone. A turn is computed at once, while the clock of
the process runs ahead by what it takes; if the process ends meanwhile, what it would have sent after
its end is lost (``wire``).
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Literal, Protocol

import numpy as np

from setpoint.config.pool import resolve_pool
from setpoint.core.control import EngineFacts
from setpoint.core.messages import (
    Alive,
    Announce,
    Failed,
    Posted,
    Ready,
    Shutdown,
    Starting,
    Submit,
    ToFrontend,
    Tokens,
    ToLoop,
    decode_to_engine,
    encode,
)
from setpoint.core.operations import MemoryPart, Operation, Operator
from setpoint.core.plan import Admit, StepPlan
from setpoint.core.records import Record
from setpoint.core.request import Ids, Request
from setpoint.core.transfers import Mover
from setpoint.ipc.line import EngineLine
from setpoint.ipc.link import SocketLink
from setpoint.ipc.sockets import MessageSocket
from setpoint.launch.heartbeat import Heartbeat
from setpoint.launch.job import EngineJob, decode_job, encode_job
from setpoint.launch.parent.process import until_reported
from setpoint.launch.settings import live_settings, scheduler_config
from setpoint.scheduler import invariants
from setpoint.scheduler.cache.manager import CacheConfig
from setpoint.scheduler.cache.news import CacheNews
from setpoint.scheduler.loop import Loop
from setpoint.scheduler.scheduler import Scheduler
from setpoint.tiers.identity import IdentifiedTiers, TierOperator
from setpoint_testing.preparers import ScriptedPreparer
from setpoint_testing.scripted import EMPTY, ScriptedExecutor, ScriptedStep
from setpoint_testing.simulation.model import FIRST_LETTER, Spelling, token_after
from setpoint_testing.simulation.operating import SimulatedOperator
from setpoint_testing.simulation.virtual_time import VirtualLoop
from setpoint_testing.simulation.wire import End, socket_pair

QUEUE_FULL = "The request queue is full."

KILLED, CRASHED = -signal.SIGKILL, -signal.SIGSEGV

StepFault = Literal["kill before", "kill after", "crash before", "crash after", "hang", "fail"]
"""What becomes of an engine in a step: it ends before or after the step's tokens are sent, it never
finishes the step, or the step raises."""
StartKind = Literal["ready", "refuses", "crashes", "is killed", "hangs"]
MessageFault = Literal["doubled", "cut", "garbled", "foreign"]
"""What becomes of a message to the frontend; foreign: one of an earlier life comes first."""


class Death(BaseException):
    """The process ends here; no Exception, which the loop may take for the fault of a request."""

    def __init__(self, code: int) -> None:
        self.code = code


class Hang(BaseException):
    """The process never goes on from here."""


@dataclass(slots=True)
class Poison:
    """Requests that end the engine that computes a certain output of theirs."""

    deaths: dict[tuple[int, int], int] = field(default_factory=dict)
    """(seed, output) -> how the process ends."""

    def check(self, seed: int, position: int) -> None:
        code = self.deaths.get((seed, position))
        if code is not None:
            raise Death(code)


class EngineTiers(Mover, IdentifiedTiers, Protocol):
    """The cache tiers of an engine."""

    def on(self, record: Record) -> None: ...

    def died(self) -> None: ...


class World(Protocol):
    """What an engine asks of what is around it, and reports to it."""

    loop: VirtualLoop
    rng: Random
    numbers: count[int]
    poison: Poison

    def note(self, who: SimulatedEngine | str, what: str) -> None: ...

    def delay_s(self) -> float:
        """How long the next bytes take."""
        ...

    def step_s(self) -> float:
        """How long the next step takes."""
        ...

    def fault_of_step(self, engine: SimulatedEngine) -> StepFault | None: ...

    def with_fault(
        self, engine: SimulatedEngine, fault: MessageFault | None, data: bytes
    ) -> list[bytes]:
        """What is sent in the place of a message."""
        ...

    def keep_for_later(self, data: bytes) -> None:
        """These tokens may come once more, from another engine."""

    def executor(
        self, engine: SimulatedEngine, num_pages: int, page_size: int
    ) -> tuple[SimulatedExecutor, EngineTiers | None]:
        """What computes, and the cache tiers, if the server has some."""
        ...

    def came_to(self, message: Submit) -> None:
        """An engine has read a request."""

    def refused(self, number: int) -> None:
        """An engine's queue has no room for a request."""

    def check(self, engine: SimulatedEngine, scheduler: Scheduler) -> None:
        """Called after each turn."""

    def step_failed(self, error: Exception) -> None: ...

    def died(self, engine: SimulatedEngine, code: int) -> None: ...


@dataclass(slots=True)
class ProcessClock:
    """The time of a process: that of the loop, and ahead of it within a turn."""

    time: Callable[[], float]
    ahead_at: float = 0.0

    def now(self) -> float:
        return max(self.time(), self.ahead_at)

    def spend(self, seconds: float) -> None:
        self.ahead_at = self.now() + seconds


class SimulatedExecutor(ScriptedExecutor):
    def __init__(self, engine: SimulatedEngine, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages=num_pages, page_size=page_size, next_token=lambda history: 0)
        self._engine = engine
        self._admits: dict[int, Admit] = {}
        self.look_at = self._admitted

    def take(self) -> None:
        """Have new memory for keys and values."""
        self.store = np.full_like(self.store, EMPTY)

    def _admitted(self, admit: Admit) -> None:
        self._admits[admit.slot] = admit

    def submit(self, plan: StepPlan) -> ScriptedStep:
        self.plans.clear()
        self._engine.begin_step(plan)
        return super().submit(plan)

    def sample(self, slot: int, history: Ids) -> int:
        admit = self._admits[slot]
        self._engine.world.poison.check(admit.seed, len(history) - admit.num_prompt)
        token = token_after(history, admit.seed)
        too_early = len(history) - admit.num_prompt < admit.sampling.min_new_tokens
        return FIRST_LETTER + 1 if too_early and token in admit.stop_ids else token


class EngineEnd:
    """The inbox and outbox of the loop, as ``ipc.sockets.EngineSocket`` is in a process."""

    def __init__(self, engine: SimulatedEngine, end: End) -> None:
        self._engine = engine
        self._end = end
        self._messages = MessageSocket(end)  # type: ignore[arg-type]
        self._posted: deque[Posted] = deque()
        self.rest_s = 0.0
        """How long the loop would have waited for a message when there was none."""
        self.is_shut_down = False
        self.fileno = end.fileno

    def post(self, message: Posted) -> None:
        self._posted.append(message)
        self._engine.wake()

    def receive(self, timeout_s: float) -> list[ToLoop]:
        messages: list[ToLoop] = list(self._posted)
        self._posted.clear()
        self._messages.flush()
        for data in self._messages.receive():
            message = decode_to_engine(data)
            messages.append(message)
            if isinstance(message, Submit):
                self._engine.world.came_to(message)
        if self._messages.is_cut:
            messages.append(Shutdown())
        self.is_shut_down = any(isinstance(each, Shutdown) for each in messages)
        self.rest_s = 0.0 if messages else timeout_s
        return messages

    def flush(self) -> None:
        self._messages.flush()

    @property
    def has_unsent(self) -> bool:
        return self._messages.has_unsent

    def send(self, message: ToFrontend) -> None:
        engine = self._engine
        data, fault = encode(message), None
        if not isinstance(message, Alive):
            fault = engine.next_message_fault
            engine.next_message_fault = None
            engine.world.note(engine, _described(message) + (f" ({fault})" if fault else ""))
        engine.sent(message, data)
        for each in engine.world.with_fault(engine, fault, data):
            self._messages.send(each)
        if isinstance(message, Tokens):
            for event in message.events:
                if event.finish is not None and event.finish.message == QUEUE_FULL:
                    engine.world.refused(event.seq_id)
            engine.tokens_sent()

    def close(self, at: float) -> None:
        self._end.close(at)


def _described(message: ToFrontend) -> str:
    match message:
        case Tokens(events):
            return "tokens " + " ".join(
                f"{each.seq_id}:{','.join(map(str, each.ids))}{'.' if each.finish else ''}"
                for each in events
            )
        case Announce(joined, left):
            return f"announces +{list(joined)} -{left}"
        case _:
            return type(message).__name__


@dataclass(slots=True)
class Start:
    """How a process starts."""

    kind: StartKind = "ready"
    seconds: float = 1.0


@dataclass(eq=False)
class SimulatedEngine:
    """Implements launch.parent.process.EngineProcess and Watched, and the Operator of its loop."""

    world: World
    rank: int
    pid: int
    start: Start
    step_fault: StepFault | None = None
    """What becomes of the next step."""
    next_message_fault: MessageFault | None = None
    code: int | None = None
    """How it has ended."""
    is_hung: bool = False
    is_given_up: bool = False
    """Whether the server has killed it."""
    loop: Loop | None = None
    num_steps: int = 0
    is_standing: bool = False
    """Whether a signal has stopped it."""

    def __post_init__(self) -> None:
        world = self.world
        self.clock = ProcessClock(world.loop.time)
        self._ours, theirs = socket_pair(world.loop, world.rng, world.numbers, world.delay_s)
        theirs.clock = self.clock.now
        self._link = SocketLink(self._ours)  # type: ignore[arg-type]
        self.link = EngineEnd(self, theirs)
        world.loop.add_reader(theirs.fileno(), self.wake)
        world.loop.add_writer(theirs.fileno(), self._flush)
        self.job: EngineJob
        self._line: EngineLine | None = None
        """Hears when the process is stopped and when it continues."""
        self._ended: asyncio.Future[int] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_turn = False
        self._due_at = 0.0
        self.operator: SimulatedOperator
        self.tiers: EngineTiers | None = None
        self._executor: SimulatedExecutor

    # ------------------------------------------------------------------ as the parent sees it

    def open_link(self) -> SocketLink:
        return self._link

    def hand_over(self, job: EngineJob) -> None:
        self.job = decode_job(encode_job(job))  # as the process would read it
        self.operator = SimulatedOperator(self.job, lambda: self._executor.take())
        self.world.loop.call_later(self.start.seconds, self._started)

    async def watch(self, line: EngineLine, *, watchdog_s: float) -> None:
        self._line = line
        self._ended = self.world.loop.create_future()
        if self.code is not None:
            self._ended.set_result(self.code)
        await until_reported(self._ended, line, self, watchdog_s=watchdog_s)

    def is_stopped(self) -> bool:
        return self.is_standing or self.code is not None

    def write_stacks(self) -> None:
        self.world.note(self, "writes its stacks")

    def kill(self) -> None:
        self.is_given_up = self.code is None
        self.die(KILLED)

    def end(self) -> None:
        self.kill()
        self._link.close()

    # ------------------------------------------------------------------ what happens to it

    def die(self, code: int) -> None:
        """End it now: in a turn, by its own clock."""
        if self.code is not None:
            return
        self.code = code
        at = self.clock.now() if self._is_in_turn else self.world.loop.time()
        self.world.died(self, code)
        if self.tiers is not None:
            self.tiers.died()
        self.link.close(at)
        notice_s = self.world.rng.uniform(0.0, 0.05)
        self.world.loop.call_at(at + notice_s, self._reaped)

    def _reaped(self) -> None:
        if self._ended is not None and not self._ended.done():
            assert self.code is not None
            self._ended.set_result(self.code)

    def stop(self, is_stopped: bool) -> None:
        """A signal stops it, or has it continue."""
        if self.code is None and self.is_standing != is_stopped:
            self.is_standing = is_stopped
            self.world.note(self, "is stopped" if is_stopped else "continues")
            if self._line is not None:
                self.world.loop.call_soon(self._line.suspended, is_stopped)
            self.wake()

    def close_link(self) -> None:
        """It closes its end, and goes on."""
        if self.code is None:
            self.world.note(self, "closes its link")
            self.is_hung = True
            self.link.close(self.world.loop.time())

    # ------------------------------------------------------------------ what it does

    def _started(self) -> None:
        if self.code is not None:
            return
        match self.start.kind:
            case "hangs":
                self.is_hung = True
            case "refuses":
                self.link.send(Failed("The weights cannot be read."))
                self.die(1)
            case "crashes":
                self.die(CRASHED)
            case "is killed":
                self.die(KILLED)
            case "ready":
                self._serve()

    def _serve(self) -> None:
        self.link.send(Starting("loading"))
        config, spec = self.job.config, self.job.spec
        num_tokens, page_size = (
            config.options.memory.max_total_tokens,
            config.options.memory.page_size,
        )
        assert num_tokens is not None
        pool = resolve_pool(config, num_tokens)
        cache = CacheConfig(num_pages=num_tokens // page_size, page_size=page_size).empty_cache()
        if self.job.tells_prefixes:
            cache.listen(CacheNews())
        preparer = ScriptedPreparer(
            lambda request: Spelling(),
            needs=lambda request: request.sampling.constraint is not None,
            hold=True,
        )
        preparer.post = self.link.post
        preparer.vocab_size = spec.vocab_size
        self._hold(preparer)
        executor, tiers = self.world.executor(self, num_tokens // page_size, page_size)
        self.tiers, self._executor = tiers, executor
        operator: Operator = self if tiers is None else TierOperator(self, tiers)
        self.scheduler = Scheduler(
            scheduler_config(config, pool, spec),
            live_settings(config, pool),
            cache,
            observer=self,
            preparer=preparer,
            mover=tiers,
        )
        self.loop = Loop(
            self.scheduler,
            executor,
            self.link,
            depth=config.overlap_depth,
            clock=self.clock,
            observer=self,
            operator=operator,
            heartbeat=Heartbeat(
                self.link, lambda: self.scheduler.state.stands_still, self.clock.now
            ),
        )
        self.link.send(
            Ready(
                EngineFacts(
                    max_total_num_tokens=num_tokens,
                    max_running_requests=pool.max_running_requests,
                    max_req_len=pool.max_req_len,
                    max_req_input_len=pool.max_req_input_len,
                )
            )
        )
        self.wake()

    def _hold(self, preparer: ScriptedPreparer) -> None:
        """Have grammars take a while."""
        start, make_ready = preparer.start, preparer.make_ready

        def finish(seq_id: int, wanted: object) -> None:
            if self.code is None and preparer.open.get(seq_id) is wanted:
                preparer.finish(seq_id)

        def later(seq_id: int) -> None:
            wanted = preparer.open[seq_id]
            self.world.loop.call_later(self.world.rng.uniform(0, 0.2), finish, seq_id, wanted)

        def started(seq_id: int, request: Request, outputs: Ids) -> None:
            start(seq_id, request, outputs)
            later(seq_id)

        def readied(seq_id: int, grammar: object) -> None:
            make_ready(seq_id, grammar)  # type: ignore[arg-type]
            later(seq_id)

        preparer.start, preparer.make_ready = started, readied  # type: ignore[method-assign]

    def operate(self, call_id: int, operation: Operation) -> str:
        self.clock.spend(self.world.step_s())
        return self.operator.operate(call_id, operation)

    @property
    def released(self) -> frozenset[MemoryPart]:
        return self.operator.released

    def on(self, record: Record) -> None:
        """Implements Observer: what the loop decides is seen by its messages."""
        if self.tiers is not None:
            self.tiers.on(record)

    def wake(self) -> None:
        """Take a turn as soon as the one before is over."""
        self._at(max(self.world.loop.time(), self.clock.ahead_at))

    def _flush(self) -> None:
        if self.code is None and self.link.has_unsent:
            self.link.flush()

    def _at(self, at: float) -> None:
        if self._timer is not None:
            if self._due_at <= at:
                return
            self._timer.cancel()
        self._due_at = at
        self._timer = self.world.loop.call_at(at, self._turn)

    def _turn(self) -> None:
        if self.loop is None or self.code is not None or self.is_hung or self.is_standing:
            self._timer = None
            return
        self._is_in_turn = True
        try:
            self.loop.step()
            self.world.check(self, self.scheduler)
        except Death as death:
            self.die(death.code)
        except Hang:
            self.world.note(self, "hangs")
            self.is_hung = True
        except Exception as error:
            self.world.note(self, f"fails: {error!r}")
            self.world.step_failed(error)
            self.die(1)
        if self.link.is_shut_down:
            self.die(0)
        self._is_in_turn = False
        self._timer = None
        if self.link.rest_s:
            self._at(self.clock.now() + self.link.rest_s)
        else:
            self.wake()

    def begin_step(self, plan: StepPlan) -> None:
        self.num_steps += 1
        self.clock.spend(self.world.step_s())
        self.step_fault = self.world.fault_of_step(self) or self.step_fault
        match self.step_fault:
            case "kill before":
                raise Death(KILLED)
            case "crash before":
                raise Death(CRASHED)
            case "hang":
                raise Hang
            case "fail":
                raise RuntimeError("a fault in the middle of a step")

    def tokens_sent(self) -> None:
        match self.step_fault:
            case "kill after":
                raise Death(KILLED)
            case "crash after":
                raise Death(CRASHED)

    def sent(self, message: ToFrontend, data: bytes) -> None:
        if isinstance(message, Tokens):
            self.world.keep_for_later(data)


def is_at_rest(engine: SimulatedEngine) -> list[str]:
    """What an engine without requests still holds."""
    state = engine.scheduler.state
    pool = state.cache.pool_stats()
    found = invariants.leaks(pool, idle=True) + invariants.violations(state)
    if pool.free + pool.evictable != pool.total:
        found.append(f"the pool is not free: {pool}")
    found += [f"sequence {each} is left" for each in state.by_id]
    return found
