"""Processes that run a grammar library which has no limits of its own. Each constraint has its own
process, so one that computes for ever can be killed without affecting the others.

The processes are forked from a *nursery*, which has imported the library and read the tokenizer, so
a new one is there in milliseconds. They limit their own computing time and memory
(``process_server``); the kernel enforces the limits. A process ends when the last reference to its
``GrammarProcess`` goes.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from setpoint.core.constraint import Constraint
from setpoint.core.errors import RequestError
from setpoint.core.framing import Unpacker
from setpoint.core.process_state import is_stopped
from setpoint.grammar.constraint_refusal import not_compiled
from setpoint.grammar.process_messages import (
    Advance,
    Compile,
    Compiled,
    Forget,
    FromProcess,
    MatcherState,
    Started,
    ToProcess,
    from_process,
    pack,
)
from setpoint.sandbox.process_limits import STOPPED, Ending, StopDetector, ending

COMPILE_S = 20.0
"""Computing time in which a constraint must be compiled."""
TOKEN_S = 0.25
"""Computing time for one token: to accept it, and to find those that may come next."""
MEMORY_BYTES = 1 << 30
"""Memory of a process beyond what it has when it begins."""
STATUS = struct.Struct("<i")
"""The exit code of a process, negative for a signal, as its parent writes it."""
STATUS_S = 5.0
"""How long the parent may take to write it. It may be gone, too."""
MAX_PROCESSES = 64
"""Each takes some 25 MB, and its compiled constraint."""
POLL_S = 0.05
"""How often a waiting thread checks whether the answer is still wanted and whether another thread
has read it."""

_OURS = (signal.SIGINT, signal.SIGTERM)
"""Blocked in the processes: Ctrl-C reaches every process of a terminal, but these end with the
engine."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

TOO_MANY = (
    f"More than {MAX_PROCESSES} different constraints are in use at present. Repeat the request"
    " later."
)


class ProcessLostError(Exception):
    """The process is gone. ``args[0]``: how it ended."""

    @property
    def ending(self) -> Ending:
        found = self.args[0]
        assert isinstance(found, Ending)
        return found

    def in_words(self) -> RequestError:
        """The error (503) of a request whose process somebody else has ended."""
        return RequestError(
            f"The process of the grammar {self.ending.why}. Repeat the request later.",
            status_code=503,
        )


class ProcessWaiter(Protocol):
    """A sequence that waits for a process."""

    num_pending: int
    """Number of answers that have not come."""

    def take(self, state: MatcherState) -> None:
        """Called with each answer, by the thread that has read it."""
        ...


class GrammarProcess:
    """The process of one constraint. Safe to use from several threads."""

    def __init__(self, link: socket.socket, status: int, parent: int) -> None:
        """status: where its parent writes how it has ended. parent: its parent's id."""
        link.setblocking(False)
        self._status = status
        self._ending: Ending | None = None
        """How it has ended, once that was asked for."""
        self._link = link
        self._lock = threading.Lock()
        """Guards the fields below, and reading."""
        self._unpacker = Unpacker()
        self._listeners: weakref.WeakValueDictionary[int, ProcessWaiter] = (
            weakref.WeakValueDictionary()
        )
        self._num_listeners = 0
        self._control: list[Started | Compiled] = []
        self._is_lost = self._was_killed = False
        self._pid_fd: list[int] = []
        """The descriptor of the process, once it has said that it is there."""
        self._pid = parent
        """The process; until it has said that it is there, its parent."""
        self.num_bytes = 0
        """Memory of the compiled constraint."""
        weakref.finalize(self, _end, link, status, self._pid_fd)

    def compile(self, constraint: Constraint, is_wanted: Callable[[], bool]) -> None:
        """Have the constraint compiled. Blocks. Raises RequestError (400) if it cannot be, and
        ProcessLostError if somebody else has ended the process."""
        try:
            # Its id is needed to end it, so this is waited for in any case.
            started = self._answer()
            assert isinstance(started, Started)
            self._pid_fd.append(os.pidfd_open(started.pid))
            self._pid = started.pid
            self._link.setblocking(True)  # the text may be longer than what the kernel buffers
            self._link.sendall(pack(Compile(constraint.kind, constraint.text)))
            self._link.setblocking(False)
            compiled = self._answer(is_wanted)
        except _UnwantedError:
            raise not_compiled(constraint, "nobody waits for it any more") from None
        except (ProcessLostError, OSError):
            if not self._how_it_ended().is_its_own:
                raise ProcessLostError(self._how_it_ended()) from None
            raise not_compiled(
                constraint,
                f"it takes more than {COMPILE_S:g} s of computing, {TOKEN_S:g} s for one token, or"
                f" {MEMORY_BYTES >> 20} MiB of memory",
            ) from None
        assert isinstance(compiled, Compiled)
        if compiled.refusal:
            raise not_compiled(constraint, compiled.refusal)
        self.num_bytes = compiled.num_bytes

    @property
    def is_lost(self) -> bool:
        """Whether the process is gone, so that the constraint has to be compiled again."""
        with self._lock:
            self._read()
            return self._is_lost

    def join(self, listener: ProcessWaiter) -> int:
        """The number under which the listener gets answers, as long as it lives."""
        with self._lock:
            self._num_listeners += 1
            self._listeners[self._num_listeners] = listener
        weakref.finalize(listener, self._forget, self._num_listeners)
        return self._num_listeners

    def advance(self, number: int, tokens: Sequence[int]) -> None:
        """Send the next tokens of a sequence; does not wait."""
        self._send(Advance(number, list(tokens)))

    def wait(self, listener: ProcessWaiter, timeout_s: float) -> bool:
        """Wait until the listener has all its answers; False if it takes longer. Raises
        ProcessLostError."""
        until, standstill = time.monotonic() + timeout_s, StopDetector()
        while True:
            with self._lock:
                self._read()
                if not listener.num_pending:
                    return True
                if self._is_lost:
                    raise ProcessLostError(self._how_it_ended())
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._poll(min(left, POLL_S), standstill)

    def _answer(self, is_wanted: Callable[[], bool] = lambda: True) -> Started | Compiled:
        standstill = StopDetector()
        while True:
            with self._lock:
                self._read()
                if self._control:
                    return self._control.pop(0)
                if self._is_lost:
                    raise ProcessLostError(self._how_it_ended())
            if not is_wanted():
                self._kill()
                raise _UnwantedError
            self._poll(POLL_S, standstill)

    def _poll(self, timeout_s: float, standstill: StopDetector) -> None:
        """Wait for a message. A process that is stopped is ended."""
        _wait_for(self._link.fileno(), timeout_s)
        if standstill.lasts(self._pid):
            self._ending = STOPPED
            self._kill()

    def _how_it_ended(self) -> Ending:
        if self._ending is None:
            self._ending = self._told_ending()
        return self._ending

    def _told_ending(self) -> Ending:
        """What the parent says."""
        if self._was_killed:
            return Ending("reads nothing any more", True)
        _wait_for(self._status, STATUS_S)
        with suppress(BlockingIOError):
            if len(data := os.read(self._status, STATUS.size)) == STATUS.size:
                (code,) = STATUS.unpack(data)
                return ending(code, cpu_s=COMPILE_S, memory_bytes=MEMORY_BYTES)
        return Ending("ended together with its parent", False)

    def _read(self) -> None:
        """Take all messages that have come. The caller holds the lock."""
        while not self._is_lost:
            try:
                data = self._link.recv(1 << 20)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._is_lost = not data
            for message in self._unpacker.feed(data):
                self._take(from_process.decode(message))

    def _take(self, message: FromProcess) -> None:
        if not isinstance(message, MatcherState):
            self._control.append(message)
        elif (listener := self._listeners.get(message.number)) is not None:
            listener.take(message)

    def _send(self, message: ToProcess) -> None:
        try:
            sent = self._link.send(data := pack(message))
        except OSError:  # it is gone, or reads no more
            sent, data = 0, b"?"
        if sent < len(data):
            self._kill()

    def _forget(self, number: int) -> None:
        self._send(Forget(number))

    def _kill(self) -> None:
        self._is_lost = True
        self._was_killed = _is_alive(self._pid_fd)
        _kill(self._pid_fd)


class _UnwantedError(Exception):
    """Nobody waits for the answer any more."""


def _wait_for(descriptor: int, timeout_s: float) -> None:
    """Wait until there is something to read, or the time is up."""
    poll = select.poll()  # select takes no descriptors above 1,023
    poll.register(descriptor, select.POLLIN)
    poll.poll(1000 * timeout_s)


def _is_alive(pid_fd: list[int]) -> bool:
    """Whether the process has not ended: the descriptor of one that has can be read."""
    poll = select.poll()
    for each in pid_fd:
        poll.register(each, select.POLLIN)
    return not poll.poll(0)


def _kill(pid_fd: list[int]) -> None:
    for each in pid_fd:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(each, signal.SIGKILL)


def _end(link: socket.socket, status: int, pid_fd: list[int]) -> None:
    """End a process that nobody needs any more."""
    _kill(pid_fd)
    link.close()
    for each in (status, *pid_fd):
        os.close(each)


class Nursery:
    """Makes the processes. Safe to use from several threads."""

    def __init__(self, command: Sequence[str]) -> None:
        """command: what to run. It gets a socket as standard input, and for each pair of
        descriptors that arrives there, forks a process that talks over the first, and writes to the
        second how it has ended."""
        self._command = tuple(command)
        self._lock = threading.Lock()
        self._parent: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        """The other end of the standard input of the parent of all processes."""
        self._living: weakref.WeakSet[GrammarProcess] = weakref.WeakSet()

    @property
    def is_full(self) -> bool:
        return len(self._living) >= MAX_PROCESSES

    def new(self) -> GrammarProcess:
        """A process, which may still be on its way. Raises RequestError (503) if there are too
        many, or none can be made."""
        with self._lock:
            if self.is_full:
                raise RequestError(TOO_MANY, status_code=503)
            ours, theirs = socket.socketpair()
            status, write_status = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._send([theirs.fileno(), write_status])
            except OSError as error:
                ours.close()
                os.close(status)
                raise RequestError(
                    f"The process that makes grammars cannot be started: {error.strerror}.",
                    status_code=503,
                ) from None
            finally:
                theirs.close()
                os.close(write_status)
            assert self._parent is not None
            process = GrammarProcess(ours, status, self._parent.pid)
            self._living.add(process)
            return process

    def compiled(
        self, constraint: Constraint, is_wanted: Callable[[], bool] = lambda: True
    ) -> GrammarProcess:
        """A process that has compiled a constraint. If somebody else ends it, another one is tried.
        Raises RequestError: 400 if the constraint cannot be compiled, 503 as ``new`` does and if
        the second process is ended, too."""
        try:
            return self._compiled(constraint, is_wanted)
        except ProcessLostError:
            pass
        try:
            return self._compiled(constraint, is_wanted)
        except ProcessLostError as error:
            raise error.in_words() from None

    def _compiled(self, constraint: Constraint, is_wanted: Callable[[], bool]) -> GrammarProcess:
        process = self.new()
        process.compile(constraint, is_wanted)
        return process

    def _send(self, descriptors: list[int]) -> None:
        if self._parent is not None and is_stopped(self._parent.pid):
            self._parent.kill()
            self._parent.wait()
        if self._parent is None or self._parent.poll() is not None:  # it has crashed
            self._start()
        assert self._control is not None
        socket.send_fds(self._control, [b"."], descriptors)

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
        try:
            self._parent = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=os.environ | _ONE_THREAD,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        weakref.finalize(self, _end_parent, self._parent, self._control)


def _end_parent(parent: subprocess.Popen[bytes], control: socket.socket) -> None:
    parent.kill()  # it has no state to lose
    parent.wait()
    control.close()
