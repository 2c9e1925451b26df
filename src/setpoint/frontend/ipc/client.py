"""What the frontend says to the engine and hears from it: submits, aborts, control calls, and the routing of answers.

Works on ``core.messages`` over any EngineLink (sockets in production, a fake engine in tests). It knows nothing of text or
HTTP. Everything here runs on one event loop, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.messages import (
    Abort,
    Announce,
    Call,
    Failed,
    Ready,
    Reply,
    Shutdown,
    Stop,
    Submit,
    ToEngine,
    ToFrontend,
    TokenEvent,
    Tokens,
    decode_to_frontend,
    encode,
)
from setpoint.core.request import Request
from setpoint.core.shown import shown

logger = logging.getLogger(__name__)


class EngineLink(Protocol):
    """Carries encoded messages to an engine and hands back each one that comes, on the event loop."""

    def start(self, receiver: Callable[[bytes], None]) -> None: ...

    def send(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class EngineState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    DEAD = "dead"


class Mailbox:
    """Token events of the sequences of one client request, as (index, event). One reader; one wake-up per message."""

    def __init__(self) -> None:
        self._events: list[tuple[int, TokenEvent]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def put(self, index: int, event: TokenEvent) -> None:
        self._events.append((index, event))
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    async def take(self) -> list[tuple[int, TokenEvent]]:
        """All events that are here, waiting for the first. Raises what ``fail`` was given once the events are read."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        return events

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """The frontend's view of one engine. Contract: every submitted rid ends with a finish event, ``stop`` or a failed mailbox."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._mailboxes: dict[str, tuple[Mailbox, int]] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._next_call = 0
        self._waiters: set[asyncio.Future[None]] = set()
        """Who wants to know of the next message, or of the engine's death."""
        self.state = EngineState.STARTING
        self.info: dict[str, Any] = {}
        """``Ready.info``, once the engine is ready."""
        self.death = ""
        """Why the engine is gone, for people."""
        self.failed: Failed | None = None
        """Set when the engine said that it cannot start."""
        self.suspects: list[str] = []
        """Request ids of the last plan the engine announced; after a crash, the ones to look at."""

    def start(self) -> None:
        """Begin to receive; inside the running loop."""
        self._link.start(self._receive)

    def close(self) -> None:
        self._link.close()

    @property
    def num_open(self) -> int:
        return len(self._mailboxes)

    def submit(self, request: Request, mailbox: Mailbox, index: int = 0) -> None:
        """Send a request; its events go to ``mailbox`` under ``index``.

        Raises RequestError (400) for a rid in use or a number that no message can carry, EngineDeadError without an engine.
        """
        if self.state is not EngineState.READY:
            raise EngineDeadError(self.death or f"The engine is {self.state}.")
        if request.rid in self._mailboxes:
            raise RequestError(f"Duplicate request id {request.rid!r}: a request with this rid is still running.")
        try:
            data = encode(Submit(request))
        except (OverflowError, UnicodeEncodeError) as error:
            raise RequestError(f"A value of this request cannot be sent to the engine: {error}.") from None
        self._mailboxes[request.rid] = (mailbox, index)
        self._link.send(data)

    def stop(self, rid: str, mailbox: Mailbox) -> None:
        """Be done with exactly this rid: no event of it arrives any more.

        Nothing happens if it has ended, even if another request has taken the rid since: the mailbox tells them apart.
        """
        entry = self._mailboxes.get(rid)
        if entry is not None and entry[0] is mailbox:
            del self._mailboxes[rid]
            self._send(Stop(rid))

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Ask for the end of all rids that begin with ``rid``; their streams end with an abort event. An empty rid means none."""
        if rid or abort_all:
            self._send(Abort(rid, abort_all))

    async def call(self, name: str, args: dict[str, Any] | None = None, *, timeout_s: float = 20.0) -> Reply:
        """A control call. Raises EngineDeadError if the engine dies or does not answer in time."""
        if self.state is not EngineState.READY:
            raise EngineDeadError(self.death or f"The engine is {self.state}.")
        self._next_call += 1
        call_id = self._next_call
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(Call(call_id, name, args or {}))
        try:
            # Not wait_for: before Python 3.12 that forgets a cancellation that comes together with the answer.
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise EngineDeadError(f"The engine did not answer {name!r} within {timeout_s:g} s.") from None
        finally:
            del self._calls[call_id]

    async def wait_message(self, *, timeout_s: float) -> bool:
        """True as soon as the engine says anything at all (or changes state), False after ``timeout_s``."""
        future = asyncio.get_running_loop().create_future()
        self._waiters.add(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(future)
        return True

    async def wait_ready(self, *, timeout_s: float) -> bool:
        """Wait for the end of start-up: True if the engine is ready, False if it failed, died or took too long."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.state is EngineState.STARTING:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or not await self.wait_message(timeout_s=left):
                break
        return self.state is EngineState.READY

    def shutdown(self) -> None:
        """Ask the engine to end; open requests fail."""
        if self.state not in (EngineState.STOPPING, EngineState.DEAD):
            self._send(Shutdown())
            self._end(EngineState.STOPPING, "The engine is shutting down.")

    def engine_died(self, reason: str) -> None:
        """Called by whoever watches the process. All open requests and calls end with EngineDeadError(reason)."""
        if self.state is not EngineState.DEAD:
            logger.error("The engine died: %s Requests of its last plan: %s", reason, ", ".join(map(shown, self.suspects)) or "none")
            self._end(EngineState.DEAD, reason)

    def _end(self, state: EngineState, reason: str) -> None:
        self.state = state
        self.death = reason
        error = EngineDeadError(reason)
        for mailbox, _ in self._mailboxes.values():
            mailbox.fail(error)
        self._mailboxes.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._notify()

    def _send(self, message: ToEngine) -> None:
        self._link.send(encode(message))

    def _receive(self, data: bytes) -> None:
        try:
            message = decode_to_frontend(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.error("Dropped a malformed message of %d bytes from the engine: %s", len(data), error)
            return
        self._dispatch(message)
        self._notify()

    def _dispatch(self, message: ToFrontend) -> None:
        match message:
            case Tokens(events):
                self._route(events)
            case Announce(_, rids):
                self.suspects = rids
            case Reply(call_id):
                future = self._calls.get(call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case Ready(info):
                if self.state is EngineState.STARTING:
                    self.state = EngineState.READY
                    self.info = info
            case Failed(reason):
                self.failed = message
                self._end(EngineState.DEAD, reason)

    def _route(self, events: list[TokenEvent]) -> None:
        for event in events:
            entry = self._mailboxes.get(event.rid)
            if entry is None:
                continue  # stopped meanwhile: its last events were on the way
            if event.finish is not None:
                del self._mailboxes[event.rid]
            mailbox, index = entry
            mailbox.put(index, event)

    def _notify(self) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_result(None)
