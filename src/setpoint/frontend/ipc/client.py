"""What the frontend says to the engine and hears from it: submits, aborts, control calls, and the
routing of answers.

Works on ``core.messages`` over any EngineLink (sockets in production, a fake engine in tests). It
knows nothing of text or HTTP. Everything here runs on one event loop, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
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
    Starting,
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
    """Carries encoded messages to an engine and hands back each one that comes, on the event
    loop."""

    def start(self, receiver: Callable[[bytes], None]) -> None: ...

    def send(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class EngineState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    DEAD = "dead"


class Mailbox:
    """Token events of the sequences of one client request, as (index, event). One reader; one
    wake-up per message."""

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
        """All events that are here, waiting for the first. Raises what ``fail`` was given once the
        events are read."""
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


@dataclass(slots=True, frozen=True)
class _Submission:
    rid: str
    mailbox: Mailbox
    index: int
    """Of the sequence among those of its mailbox."""


class EngineClient:
    """The frontend's view of one engine. Contract: every submission ends with a finish event,
    ``stop`` or a failed mailbox.

    Submissions go by number, so that what is still on the way for one cannot reach another that
    uses its rid again.
    """

    def __init__(
        self, link: EngineLink, *, on_progress: Callable[[str], None] = lambda doing: None
    ) -> None:
        """``on_progress`` gets what the engine does before it is ready."""
        self._link = link
        self._on_progress = on_progress
        self._open: dict[int, _Submission] = {}
        self._seq_ids: dict[str, int] = {}
        """Of the open submissions, by rid."""
        self._next_seq_id = 0
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._next_call = 0
        self._waiters: set[asyncio.Future[None]] = set()
        """Who wants to know of the next message, or of the engine's death."""
        self.state = EngineState.STARTING
        self._is_suspended = False
        self._result_at = -math.inf
        """time.monotonic() of the last tokens that came."""
        self.info: dict[str, Any] = {}
        """``Ready.info``, once the engine is ready."""
        self.death = ""
        """Why the engine is gone, for people."""
        self.failed: Failed | None = None
        """Set when the engine said that it cannot start."""
        self._in_flight: dict[int, str] = {}
        """Sequence number -> rid, of the plans that the engine works on, as it announced them."""

    def start(self) -> None:
        """Begin to receive; inside the running loop."""
        self._link.start(self._receive)

    def close(self) -> None:
        self._link.close()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, request: Request, mailbox: Mailbox, index: int = 0) -> int:
        """Send a request; its events go to ``mailbox`` under ``index``. Returns the number to
        ``stop`` it by.

        Raises RequestError (400) for a rid in use or a number that no message can carry,
        EngineDeadError without an engine.
        """
        if self.state is not EngineState.READY:
            raise EngineDeadError(self.death or f"The engine is {self.state}.")
        if request.rid in self._seq_ids:
            raise RequestError(
                f"Duplicate request id {request.rid!r}: a request with this rid is still running."
            )
        try:
            data = encode(Submit(self._next_seq_id, request))
        except (OverflowError, UnicodeEncodeError) as error:
            raise RequestError(
                f"A value of this request cannot be sent to the engine: {error}."
            ) from None
        seq_id = self._next_seq_id
        self._next_seq_id += 1
        self._open[seq_id] = _Submission(request.rid, mailbox, index)
        self._seq_ids[request.rid] = seq_id
        self._link.send(data)
        return seq_id

    def stop(self, seq_id: int) -> None:
        """Be done with this submission: no event of it arrives any more. Nothing happens if it has
        ended."""
        if seq_id in self._open:
            self._close(seq_id)
            self._send(Stop(seq_id))

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Ask for the end of all rids that begin with ``rid``; their streams end with an abort
        event. An empty rid means none."""
        if not rid and not abort_all:
            return
        found = [
            seq_id for own, seq_id in self._seq_ids.items() if abort_all or own.startswith(rid)
        ]
        if found:
            self._send(Abort(found))

    async def call(self, name: str, *, timeout_s: float = 20.0) -> Reply:
        """A control call. Raises EngineDeadError if the engine dies or does not answer in time."""
        if self.state is not EngineState.READY:
            raise EngineDeadError(self.death or f"The engine is {self.state}.")
        self._next_call += 1
        call_id = self._next_call
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(Call(call_id, name))
        try:
            # Not wait_for: before Python 3.12 that forgets a cancellation that comes together with
            # the answer.
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise EngineDeadError(
                f"The engine did not answer {name!r} within {timeout_s:g} s."
            ) from None
        finally:
            del self._calls[call_id]

    async def wait_message(self, *, timeout_s: float) -> bool:
        """True as soon as the engine says anything at all (or changes state), False after
        ``timeout_s``."""
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
        """Wait for the end of start-up: True if the engine is ready, False if it failed, died or
        took too long."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.state is EngineState.STARTING:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or not await self.wait_message(timeout_s=left):
                break
        return self.state is EngineState.READY

    @property
    def is_ready(self) -> bool:
        """Whether a request would be worked on now."""
        return self.state is EngineState.READY and not self._is_suspended

    @property
    def result_age_s(self) -> float:
        """Since the engine's last tokens, of whichever request."""
        return time.monotonic() - self._result_at

    def suspended(self, is_suspended: bool) -> None:
        """Called by whoever watches the process when it is stopped (SIGSTOP) or goes on
        (SIGCONT)."""
        self._is_suspended = is_suspended
        if is_suspended:
            logger.warning(
                "The engine process has been stopped by a signal: requests wait, and the server is"
                " not ready."
            )
        else:
            logger.warning("The engine process goes on.")

    def shutdown(self) -> None:
        """Ask the engine to end; open requests fail."""
        if self.state not in (EngineState.STOPPING, EngineState.DEAD):
            self._send(Shutdown())
            self._end(EngineState.STOPPING, "The engine is shutting down.")

    def engine_died(self, reason: str) -> None:
        """Called by whoever watches the process. All open requests and calls end with
        EngineDeadError(reason)."""
        if self.state is not EngineState.DEAD:
            logger.error(
                "The engine died: %s Requests of the steps in flight: %s",
                reason,
                ", ".join(map(shown, self._in_flight.values())) or "none",
            )
            self._end(EngineState.DEAD, reason)

    def _end(self, state: EngineState, reason: str) -> None:
        self.state = state
        self.death = reason
        error = EngineDeadError(reason)
        for submission in self._open.values():
            submission.mailbox.fail(error)
        self._open.clear()
        self._seq_ids.clear()
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
            logger.error(
                "Dropped a malformed message of %d bytes from the engine: %s", len(data), error
            )
            return
        self._dispatch(message)
        self._notify()

    def _dispatch(self, message: ToFrontend) -> None:
        match message:
            case Tokens(events):
                self._result_at = time.monotonic()
                self._route(events)
            case Announce(joined, left):
                for seq_id in left:
                    self._in_flight.pop(seq_id, None)
                self._in_flight.update(joined)
            case Reply(call_id):
                future = self._calls.get(call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case Starting(doing):
                self._on_progress(doing)
            case Ready(info):
                if self.state is EngineState.STARTING:
                    self.state = EngineState.READY
                    self.info = info
            case Failed(reason):
                self.failed = message
                self._end(EngineState.DEAD, reason)

    def _route(self, events: list[TokenEvent]) -> None:
        for event in events:
            submission = self._open.get(event.seq_id)
            if submission is None:
                continue  # stopped meanwhile: its last events were on the way
            if event.finish is not None:
                self._close(event.seq_id)
            submission.mailbox.put(submission.index, event)

    def _close(self, seq_id: int) -> None:
        del self._seq_ids[self._open.pop(seq_id).rid]

    def _notify(self) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_result(None)
