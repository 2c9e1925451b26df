"""The connection to one engine: the link, the engine's reports about itself, and the control calls
that it has yet to answer. It tells the engine's life (``ipc.engine_life``) what happens to it.

Works on ``core.messages`` over any EngineLink (a socket in production, a fake engine in tests). It
passes tokens on without knowing which request they belong to: the EngineClient holds the requests,
because it outlives a line. Everything here runs on one event loop, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

import msgspec

from setpoint.core.awake import CLOCK, timeout_awake
from setpoint.core.control import (
    Answer,
    CacheFlush,
    Call,
    Change,
    Continue,
    Done,
    EngineFacts,
    FlushCache,
    GetMoments,
    GetState,
    Hold,
    InternalState,
    ListRequests,
    Moments,
    Operate,
    OperationDone,
    OptionChange,
    Pause,
    PauseDone,
    PauseMode,
    Refused,
    RequestList,
)
from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.excerpt import excerpt
from setpoint.core.executor import Clock
from setpoint.core.messages import (
    Alive,
    Announce,
    Blocks,
    Cached,
    Failed,
    Ready,
    Reply,
    Shutdown,
    Starting,
    ToEngine,
    ToFrontend,
    TokenEvent,
    Tokens,
    decode_to_frontend,
    encode,
)
from setpoint.core.operations import STORAGE, Operation
from setpoint.core.settings import Settings
from setpoint.ipc.engine_life import EngineLife, EngineState

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=Answer)

CALL_TIMEOUT_S = 20.0
OPERATION_TIMEOUT_S = 3600.0
"""Weights may come from a slow disk."""
MISSED = "the engine had missed a change"
ORDERS = (Pause, Hold, Continue, Operate)
"""The calls with which a standstill begins or ends."""
CUT_S = 2.0
"""How long the watcher of the process has to report why the engine's end of the link is closed."""


class EngineLink(Protocol):
    """Carries encoded messages to an engine, and passes on each message that comes back, on the
    event loop."""

    def start(self, receiver: Callable[[bytes], None], on_cut: Callable[[], None]) -> None:
        """``on_cut`` is called once if the engine has closed its end, after its last message."""
        ...

    def send(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class EngineLine:
    """See the module docstring. Contract: once the line has ended, it calls its owner no more, even
    for messages that are still on their way."""

    def __init__(
        self,
        link: EngineLink,
        *,
        rank: int = 0,
        model: str = "",
        pid: int | None = None,
        on_progress: Callable[[str], None] = lambda doing: None,
        clock: Clock = CLOCK,
    ) -> None:
        """rank: which of the server's engines it is. model: whose engine it is, if the server has
        several models. pid: its process, if that is known.
        on_progress: called with a description of what the engine is doing before it is ready.
        clock: for what the engine owes this process."""
        self.rank = rank
        self.life = EngineLife(rank)
        self.label = f"{rank} of model {model}" if model else str(rank)
        """What the log calls the engine, after this word."""
        self.pid = pid
        self.clock = clock
        self._link = link
        self._on_progress = on_progress
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._missed: dict[int, Call] = {}
        """Id -> call, for those without an answer that the engine had missed."""
        self._next_call = 0
        self._waiters: dict[asyncio.Future[None], None] = {}
        """Futures that are done at the next message, or at the line's end, in order."""
        self._in_flight: dict[int, str] = {}
        """Sequence number -> rid, for the sequences in flight that the engine announced."""
        self._is_started = False
        self.still_since: float | None = None
        """Since when the engine says that it plans no steps; None: it does."""
        self._is_outdated, self._open_order = False, 0
        """Whether it said so before it carried out the last order, and the order's id until it is
        answered."""
        self._result_at = -math.inf
        """When the last tokens arrived, by the clock."""
        self._heard_at = -math.inf
        """When the last message arrived."""
        self.dead = asyncio.Event()
        """Set when the engine must not run any longer, whether it has been asked to end or not."""
        self.num_received = 0
        """Messages so far, each a sign that the engine's loop runs."""

    def start(
        self,
        on_tokens: Callable[[list[TokenEvent]], None],
        on_end: Callable[[], None],
        on_ready: Callable[[Collection[EngineLife]], None],
        on_cached: Callable[[Cached | Blocks], None],
    ) -> None:
        """Begin to receive, inside the running loop; called by the owner, and again by the next
        one. ``on_end`` is called when its life has ended and says why, ``on_ready`` with the
        engines that take requests from now on: it, at first, and after it was suspended those that
        waited for it, ``on_cached`` with the news of its cache."""
        self._on_tokens = on_tokens
        self._on_end = on_end
        self._on_ready = on_ready
        self._on_cached = on_cached
        if not self._is_started:
            self._is_started = True
            self._link.start(self._receive, self._cut)
        elif self.life.is_ready:
            on_ready([self.life])

    def close(self) -> None:
        """Receive nothing more. If the engine has ended, its process has, too."""
        if self.life.has_ended:
            self.life.close()
        self._link.close()

    @property
    def result_age_s(self) -> float:
        """Seconds since the engine's last tokens for any request."""
        return self.clock.now() - self._result_at

    @property
    def still_s(self) -> float:
        """For how long the engine says that it plans no steps; 0 as long as it has said nothing
        about that since it carried out the last order."""
        return 0.0 if self._is_outdated else self.seconds_since(self.still_since)

    def seconds_since(self, at: float | None) -> float:
        """Seconds that have passed since then by the line's clock; 0 for None."""
        return 0.0 if at is None else self.clock.now() - at

    @property
    def silence_s(self) -> float:
        """Seconds since the engine's last message."""
        return self.clock.now() - self._heard_at

    @property
    def suspects(self) -> list[str]:
        """Request ids in the steps in flight: after a crash, those that may have caused it."""
        return list(self._in_flight.values())

    @property
    def suspect_numbers(self) -> list[int]:
        """Their numbers."""
        return list(self._in_flight)

    def send(self, message: ToEngine) -> None:
        """Send a message. Raises OverflowError or UnicodeEncodeError for a number or a text
        that no message can carry; then nothing is sent."""
        self._link.send(encode(message))
        if isinstance(message, ORDERS):
            self._open_order, self._is_outdated = message.id, True

    @property
    def facts(self) -> EngineFacts:
        """The facts that the engine reported when it was ready. Raises EngineDeadError before."""
        if self.life.facts is None:
            self.check_ready()
        assert self.life.facts is not None
        return self.life.facts

    # Each control call raises EngineDeadError if the engine is not ready, dies, or does not answer
    # in time, and RequestError with its reason if it refuses (400) or fails to do it (500).

    async def get_state(self, *, timeout_s: float = CALL_TIMEOUT_S) -> InternalState:
        return await self._ask(GetState, InternalState, timeout_s)

    async def get_moments(self, since: int, *, timeout_s: float = CALL_TIMEOUT_S) -> Moments:
        return await self._ask(lambda call_id: GetMoments(call_id, since), Moments, timeout_s)

    async def list_requests(self, *, timeout_s: float = CALL_TIMEOUT_S) -> RequestList:
        return await self._ask(ListRequests, RequestList, timeout_s)

    async def flush_cache(self) -> CacheFlush:
        return await self._ask(FlushCache, CacheFlush)

    async def change(
        self, settings: Settings, options: list[OptionChange], *, by: str, why: str
    ) -> None:
        """Change the engine's settings; returns when it works under them (see
        ``core.control.Change``)."""
        await self._ask(lambda call_id: Change(call_id, settings, options, by, why), Done)

    async def pause(self, mode: PauseMode) -> PauseDone:
        """Pause the engine; returns when it is paused."""
        return await self._ask(lambda call_id: Pause(call_id, mode), PauseDone)

    async def hold(self, *, flushes: bool) -> None:
        """Have the engine stand still, which refuses if requests are open that are not paused.
        flushes: or if paused requests keep memory."""
        await self._ask(lambda call_id: Hold(call_id, flushes), Done, OPERATION_TIMEOUT_S)

    async def resume(self) -> None:
        """End a pause."""
        await self._ask(Continue, Done)

    async def operate(self, operation: Operation) -> OperationDone:
        """Have the engine carry an operation out."""
        return await self._ask(
            lambda call_id: Operate(call_id, operation), OperationDone, OPERATION_TIMEOUT_S
        )

    # The same for an engine that has missed the call: it does this before it reads what is sent
    # next, and nobody waits for its answer. An engine that refuses ends: it would answer otherwise
    # than the others.

    def begin_change(self, settings: Settings) -> None:
        self._begin(lambda call_id: Change(call_id, settings, [], by="the server", why=MISSED))

    def begin_pause(self, mode: PauseMode | None) -> None:
        """None: end the pause."""
        self._begin(Continue if mode is None else lambda call_id: Pause(call_id, mode))

    def begin_operation(self, operation: Operation) -> None:
        self._begin(lambda call_id: Operate(call_id, operation))

    def _begin(self, make: Callable[[int], Call]) -> None:
        self._next_call += 1
        call = make(self._next_call)
        self._missed[call.id] = call
        self.send(call)

    async def _ask(
        self, make: Callable[[int], Call], answer: type[A], timeout_s: float = CALL_TIMEOUT_S
    ) -> A:
        """Make the control call that ``make`` returns for an id; the engine answers it with an
        ``answer`` or a refusal."""
        self.check_ready()
        self._next_call += 1
        call = make(self._next_call)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[call.id] = future
        try:
            self.send(call)
            # Not wait_for: before Python 3.12 it loses a cancellation that arrives together with
            # the answer.
            async with timeout_awake(timeout_s, self.clock):
                found = await future
        except TimeoutError:
            raise EngineDeadError(
                f"The engine did not answer {type(call).__name__} within {timeout_s:g} s."
            ) from None
        finally:
            del self._calls[call.id]
        if isinstance(found, Refused):
            raise RequestError(found.error, status_code=found.status_code)
        assert isinstance(found, answer), f"{type(call).__name__} was answered by {found!r}"
        return found

    def check_ready(self) -> None:
        """Raise EngineDeadError with the reason if no request can be sent now."""
        if self.life.state is not EngineState.READY:
            raise EngineDeadError(self.life.death or f"The engine is {self.life.state}.")

    async def responds(self, *, timeout_s: float) -> bool:
        """Whether the engine sends any message within ``timeout_s``. It is asked for one, but
        whatever it sends before it answers counts as well."""
        self._next_call += 1
        self.send(GetState(self._next_call))
        return await self.wait_message(timeout_s=timeout_s) and self.life.is_ready

    async def wait_message(self, *, timeout_s: float) -> bool:
        """Wait for a sign of life: True as soon as any message arrives or the engine changes state,
        False after ``timeout_s``."""
        future = asyncio.get_running_loop().create_future()
        self._waiters[future] = None
        try:
            async with timeout_awake(timeout_s, self.clock):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiters.pop(future, None)
        return True

    async def wait_ready(self, *, timeout_s: float) -> bool:
        """Wait for the end of start-up: True if the engine is ready, False if it failed, died or
        took too long."""
        deadline = self.clock.now() + timeout_s
        while self.life.state is EngineState.STARTING:
            left = deadline - self.clock.now()
            if left <= 0 or not await self.wait_message(timeout_s=left):
                break
        return self.life.state is EngineState.READY

    def suspended(self, is_suspended: bool) -> None:
        """Called by the watcher of the process when the process is stopped (SIGSTOP) or continues
        (SIGCONT). Does nothing once the line has ended: a process is stopped before it is
        killed."""
        if self.life.has_ended or is_suspended == self.life.is_suspended:
            return
        if is_suspended:
            self.life.suspend(self.clock.now())
            logger.warning(
                "The process of engine %s has been stopped by a signal: its requests wait.",
                self.label,
            )
        else:
            logger.warning("The process of engine %s goes on.", self.label)
            self._on_ready(self.life.go_on())

    def shutdown(self, reason: str = "The engine is shutting down.") -> None:
        """Ask the engine to end. For the owner and its requests the line ends at once."""
        if not self.life.has_ended:
            self.send(Shutdown())
            self.life.stop(reason)
            self._end()

    def dismiss(self, reason: str) -> None:
        """End an engine that cannot do as the others do. No request is to blame for that. One that
        hangs is killed by its watcher."""
        if not self.life.has_ended:
            logger.error("Engine %s ends: %s", self.label, reason)
            self.shutdown(reason)
            self.dead.set()

    def died(self, reason: str, *, was_killed: bool = False) -> None:
        """Called by the watcher when the process has ended. Does nothing if its life has ended
        before. was_killed: see ``EngineLife``."""
        if not self.life.has_ended:
            logger.error(
                "Engine %s died: %s Requests of the steps in flight: %s",
                self.label,
                reason,
                ", ".join(map(excerpt, self.suspects)) or "none",
            )
            self.life.die(reason, was_killed=was_killed)
            self._end()

    def _end(self) -> None:
        """Tell everybody who waits that its life has ended."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(self.life.death))
        if self.life.state is EngineState.DEAD:
            self.dead.set()
        self._on_end()
        self._notify()

    def _cut(self) -> None:
        asyncio.get_running_loop().call_later(
            CUT_S, self.died, "The engine process has closed its link to the frontend."
        )

    def _receive(self, data: bytes) -> None:
        if self.life.has_ended:
            return
        self.num_received += 1
        self._heard_at = self.clock.now()
        try:
            message = decode_to_frontend(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.died(f"It sent a message of {len(data)} bytes that cannot be read: {error}.")
            return
        self._dispatch(message)
        self._notify()

    def _dispatch(self, message: ToFrontend) -> None:
        match message:
            case Tokens(events):
                self._result_at = self.clock.now()
                self._on_tokens(events)
            case Announce(joined, left):
                for seq_id in left:
                    self._in_flight.pop(seq_id, None)
                self._in_flight.update(joined)
            case Reply(call_id, answer):
                self._answered(call_id, answer)
            case Starting(doing):
                self._on_progress(doing)
            case Alive(stands_still):
                since = self.clock.now() if self.still_since is None else self.still_since
                self.still_since = since if stands_still else None
                self._is_outdated = self._open_order != 0
            case Cached() | Blocks():
                self._on_cached(message)
            case Ready(facts):
                if self.life.state is EngineState.STARTING:
                    self._on_ready(self.life.ready(facts))
            case Failed(reason, _):
                self.life.die(reason, failed=message)
                self._end()

    def _answered(self, call_id: int, answer: Answer) -> None:
        if call_id == self._open_order:
            self._open_order = 0
        future = self._calls.get(call_id)
        if future is not None and not future.done():
            future.set_result(answer)
        missed = self._missed.pop(call_id, None)
        if missed is None or not isinstance(answer, Refused):
            return
        order = missed.operation if isinstance(missed, Operate) else missed
        name = type(order).__name__
        if isinstance(order, STORAGE):  # it answers the same without
            logger.error("Engine %s refused %s: %s", self.label, name, answer.error)
        else:
            self.dismiss(f"It had missed {name}, and cannot make up for it: {answer.error}")

    def _notify(self) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_result(None)
