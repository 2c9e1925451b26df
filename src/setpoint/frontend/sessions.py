"""Sessions: trees of finished requests. A later request continues any of them and sends only
what is new. The engine knows nothing of sessions: a turn becomes a whole prompt, whose beginning
the prefix cache still has (docs/controls.md#sessions).

Bodies are also worked on in a thread, so a lock guards everything.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from sys import getsizeof
from weakref import WeakSet

import msgspec
import numpy as np

from setpoint.core.bounds import Int64
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt
from setpoint.core.request import Ids
from setpoint.frontend.jobs import Job, SequenceOutput

MAX_SESSIONS = 1024
MAX_BYTES = 128 << 20
"""Most memory that the requests of all sessions together may take, as ``_memory`` estimates it."""
REQUEST_BYTES = 400
"""Bytes of a request in Python besides its token ids and names; 320 were measured."""
ID_BYTES = 4
END_S = 10.0
"""Longest time that a request waits for those to end that it replaces. Only a client that does not
read its stream keeps one open for so long."""
IDLE_S = 3600.0
"""A session that names no timeout is closed after this many seconds without a request."""


class SessionParams(msgspec.Struct, frozen=True):
    """``session_params`` of a request."""

    id: str
    rid: str | None = None
    """The finished request to continue; None: start with an empty prompt."""
    offset: Int64 | None = None
    """How much to keep of that request's prompt and output, as the end of a Python slice;
    0 or None: all of it."""
    replace: bool = False
    """Abort ``rid`` if it still runs, and abort and delete the requests that continued it; without
    ``rid``, all of the session."""
    drop_previous_output: bool = False
    """Continue the prompt of ``rid`` without its output."""


@dataclass(slots=True)
class _Node:
    """A finished request."""

    rid: str
    prompt: Ids
    outputs: Ids
    parent: str | None
    """rid of the request that it went on from."""

    @property
    def num_ids(self) -> int:
        return len(self.prompt) + len(self.outputs)

    @property
    def num_bytes(self) -> int:
        return _memory(self.num_ids, self.rid, self.parent)


@dataclass(slots=True)
class _Session:
    capacity: int
    """Most token ids that it may keep."""
    timeout_s: float
    used_at: float
    nodes: dict[str, _Node] = field(default_factory=dict)
    """Nodes by rid; parents before children."""
    num_ids: int = 0
    num_bytes: int = 0
    """Estimated memory of the nodes."""
    turns: WeakSet[SessionTurn] = field(default_factory=WeakSet)
    """Turns that have not ended. Weak, because a job may be dropped before it begins."""

    def running(self, rid: str | None) -> list[SessionTurn]:
        """The running turns of the request ``rid`` and of those that descend from it; None: all."""
        gone = {rid, *self._below(rid)}
        return [
            turn
            for turn in self.turns
            if turn.is_running and (rid is None or turn.rid == rid or turn.params.rid in gone)
        ]

    def _below(self, rid: str | None) -> set[str]:
        """The nodes that descend from this one; None: all."""
        if rid is None:
            return set(self.nodes)
        below: set[str] = set()
        for own, node in self.nodes.items():
            if node.parent is not None and (node.parent == rid or node.parent in below):
                below.add(own)
        return below

    def forget(self, *, below: str | None) -> None:
        """Drop the nodes that descend from this one; None: all."""
        for rid in self._below(below):
            node = self.nodes.pop(rid)
            self.num_ids -= node.num_ids
            self.num_bytes -= node.num_bytes

    def add(self, node: _Node) -> None:
        self.nodes[node.rid] = node
        self.num_ids += node.num_ids
        self.num_bytes += node.num_bytes

    def memory(self) -> int:
        """Estimated memory of the nodes, and of the turns under way with their prompts."""
        return self.num_bytes + sum(turn.num_bytes for turn in self.turns)


@dataclass(slots=True, eq=False, weakref_slot=True)
class SessionTurn:
    """A request of a session, from its prompt to its end."""

    sessions: Sessions
    session: _Session
    params: SessionParams
    rid: str
    prompt: Ids
    """The whole prompt."""
    is_over: Future[None] = field(default_factory=Future)
    """Has a result when the request has ended."""
    _job: tuple[Job, asyncio.AbstractEventLoop] | None = None
    """Its job once that has begun, and the event loop of that."""

    @property
    def is_running(self) -> bool:
        return self._job is not None and not self.is_over.done()

    @property
    def num_bytes(self) -> int:
        return _memory(len(self.prompt), self.rid, self.params.rid)

    def abort(self) -> None:
        """End the request; it keeps its outputs so far. May be called in any thread."""
        assert self._job is not None
        job, loop = self._job
        loop.call_soon_threadsafe(job.abort)

    def noting(self, started: Callable[[Job], None]) -> Callable[[Job], None]:
        """``started``, followed by this turn's note of its job."""

        def begun(job: Job) -> None:
            started(job)
            self._job = job, asyncio.get_running_loop()

        return begun

    def recording(
        self, record: Callable[[SequenceOutput], None]
    ) -> Callable[[SequenceOutput], None]:
        """``record``, followed by the session's note of how the request ended."""

        def ended(output: SequenceOutput) -> None:
            record(output)
            self.sessions.ended(self, output)
            self.is_over.set_result(None)

        return ended


class Sessions:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}

    def open(self, session_id: str | None, *, capacity: int, timeout_s: float | None) -> str:
        """Open a session; returns its id. Raises RequestError for an id in use (400), or with too
        many sessions (503)."""
        with self._lock:
            self._close_idle()
            session_id = uuid.uuid4().hex if session_id is None else session_id
            if session_id in self._sessions:
                raise RequestError(f"Session id {excerpt(session_id)} is already open.")
            if len(self._sessions) >= MAX_SESSIONS:
                raise RequestError(
                    f"{MAX_SESSIONS} sessions are already open, the limit of this server; close"
                    " some (/close_session).",
                    status_code=503,
                )
            limit = IDLE_S if timeout_s is None else timeout_s
            self._sessions[session_id] = _Session(capacity, limit, self._now())
            return session_id

    def close(self, session_id: str) -> None:
        """Forget a session; its requests under way run on. Raises RequestError (400)."""
        with self._lock:
            self._find(session_id)
            del self._sessions[session_id]

    async def interrupt(self, params: SessionParams) -> None:
        """Abort the running requests that ``replace`` names, and wait until they have ended, so
        that the new request can continue them. Raises RequestError: 400 for a session that is not
        there, 503 if one does not end."""
        if not params.replace:
            return
        with self._lock:
            turns = self._find(params.id).running(params.rid)
        for turn in turns:
            turn.abort()
        for turn in turns:
            try:
                # Shielded: others may wait for the same request.
                over = asyncio.shield(asyncio.wrap_future(turn.is_over))
                await asyncio.wait_for(over, END_S)
            except TimeoutError:
                raise RequestError(
                    f"The request {excerpt(turn.rid)} does not end, because its client does not"
                    " read its answer; try again.",
                    status_code=503,
                ) from None

    def goes_on(self, params: SessionParams) -> bool:
        """Whether the request continues another, so that its text needs no beginning of its
        own. Raises RequestError (400)."""
        with self._lock:
            return self._parent(self._find(params.id), params) is not None

    def turn(self, params: SessionParams, ids: Ids, *, rid: str) -> SessionTurn:
        """The turn of a request with the new tokens ``ids``. Raises RequestError: 400 for a session
        or request that is not there, a rid that is in it already or a session that is full; 503 if
        all sessions together are."""
        with self._lock:
            session = self._find(params.id)
            if rid in session.nodes:
                raise RequestError(
                    f"The session already has a request with the rid {excerpt(rid)}; choose another"
                    " rid."
                )
            parent = self._parent(session, params)
            if parent is not None:
                before = parent.prompt
                if not params.drop_previous_output:
                    before = np.concatenate([before, parent.outputs])
                ids = np.concatenate([before[: params.offset or None], ids])
            if session.num_ids + len(ids) > session.capacity:
                raise RequestError(
                    f"The session stores {session.num_ids} tokens and would get"
                    f" {len(ids)} more; its capacity_of_str_len is {session.capacity}."
                )
            turn = SessionTurn(self, session, params, rid, ids)
            memory = sum(each.memory() for each in self._sessions.values())
            if memory + turn.num_bytes > MAX_BYTES:
                raise RequestError(
                    "The sessions of this server take too much memory; close some"
                    " (/close_session).",
                    status_code=503,
                )
            session.turns.add(turn)
            return turn

    def ended(self, turn: SessionTurn, output: SequenceOutput) -> None:
        """Keep a request that has ended, unless it was refused or failed. What it replaces is
        forgotten only now, so that a failure changes nothing."""
        with self._lock:
            session, params = turn.session, turn.params
            session.turns.discard(turn)
            session.used_at = self._now()
            finish = output.finish
            if finish is not None and finish.status_code is not None:
                return
            if params.replace:
                session.forget(below=params.rid)
            outputs = np.array(output.output_ids, np.int32)
            session.add(_Node(turn.rid, np.array(turn.prompt, np.int32), outputs, params.rid))

    def _find(self, session_id: str) -> _Session:
        self._close_idle()
        session = self._sessions.get(session_id)
        if session is None:
            raise RequestError(f"Invalid request: session id {excerpt(session_id)} does not exist")
        session.used_at = self._now()
        return session

    def _parent(self, session: _Session, params: SessionParams) -> _Node | None:
        if params.rid is None:
            return None
        if params.rid not in session.nodes:
            raise RequestError(
                f"Invalid request: session id {excerpt(params.id)} has no finished request"
                f" {excerpt(params.rid)}"
            )
        return session.nodes[params.rid]

    def _close_idle(self) -> None:
        now = self._now()
        for session_id, session in list(self._sessions.items()):
            if not session.turns and now - session.used_at > session.timeout_s:
                del self._sessions[session_id]


def _memory(num_ids: int, *names: str | None) -> int:
    """An estimate of the bytes of a request with these names: many short requests take far more
    than their token ids."""
    return REQUEST_BYTES + ID_BYTES * num_ids + sum(map(getsizeof, names))
