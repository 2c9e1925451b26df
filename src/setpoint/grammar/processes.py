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
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from setpoint.core.constraint import Constraint
from setpoint.core.errors import RequestError
from setpoint.grammar.constraint_refusal import not_compiled
from setpoint.grammar.process_messages import (
    Advance,
    Compile,
    Compiled,
    Forget,
    FromProcess,
    Place,
    Started,
    ToProcess,
    Unpacker,
    from_process,
    pack,
)

COMPILE_S = 20.0
"""Computing time in which a constraint must be compiled."""
TOKEN_S = 0.25
"""Computing time for one token: to accept it, and to find those that may come next."""
MEMORY_BYTES = 1 << 30
"""Memory of a process beyond what it has when it begins."""
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
    """The process is gone: it exceeded a limit, or crashed."""


class Listener(Protocol):
    """A sequence that waits for a process."""

    num_pending: int
    """Number of answers that have not come."""

    def take(self, place: Place) -> None:
        """Called with each answer, by the thread that has read it."""
        ...


class GrammarProcess:
    """The process of one constraint. Safe to use from several threads."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._link = link
        self._lock = threading.Lock()
        """Guards the fields below, and reading."""
        self._unpacker = Unpacker()
        self._listeners: weakref.WeakValueDictionary[int, Listener] = weakref.WeakValueDictionary()
        self._num_listeners = 0
        self._control: list[Started | Compiled] = []
        self._is_lost = False
        self._pid_fd: list[int] = []
        """The descriptor of the process, once it has said that it is there."""
        self.num_bytes = 0
        """Memory of the compiled constraint."""
        weakref.finalize(self, _end, link, self._pid_fd)

    def compile(self, constraint: Constraint, is_wanted: Callable[[], bool]) -> None:
        """Have the constraint compiled. Blocks. Raises RequestError (400) if it cannot be."""
        try:
            # Its id is needed to end it, so this is waited for in any case.
            started = self._answer(lambda: True)
            assert isinstance(started, Started)
            self._pid_fd.append(os.pidfd_open(started.pid))
            self._link.setblocking(True)  # the text may be longer than what the kernel buffers
            self._link.sendall(pack(Compile(constraint.kind, constraint.text)))
            self._link.setblocking(False)
            compiled = self._answer(is_wanted)
        except (ProcessLostError, OSError):
            raise not_compiled(
                constraint,
                f"it takes more than {COMPILE_S:g} s of computing, {TOKEN_S:g} s for one token, or"
                f" {MEMORY_BYTES >> 20} MiB of memory",
            ) from None
        assert isinstance(compiled, Compiled)
        if compiled.refusal:
            raise not_compiled(constraint, compiled.refusal)
        self.num_bytes = compiled.num_bytes

    def join(self, listener: Listener) -> int:
        """The number under which the listener gets answers, as long as it lives."""
        with self._lock:
            self._num_listeners += 1
            self._listeners[self._num_listeners] = listener
        weakref.finalize(listener, self._forget, self._num_listeners)
        return self._num_listeners

    def advance(self, number: int, tokens: Sequence[int]) -> None:
        """Send the next tokens of a sequence; does not wait."""
        self._send(Advance(number, list(tokens)))

    def wait(self, listener: Listener, timeout_s: float) -> bool:
        """Wait until the listener has all its answers; False if it takes longer. Raises
        ProcessLostError."""
        until = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._read()
                if not listener.num_pending:
                    return True
                if self._is_lost:
                    raise ProcessLostError
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._poll(min(left, POLL_S))

    def _answer(self, is_wanted: Callable[[], bool]) -> Started | Compiled:
        while True:
            with self._lock:
                self._read()
                if self._control:
                    return self._control.pop(0)
                if self._is_lost:
                    raise ProcessLostError
            if not is_wanted():
                self._kill()
                raise ProcessLostError
            self._poll(POLL_S)

    def _poll(self, timeout_s: float) -> None:
        """Wait until there is something to read, or the time is up."""
        poll = select.poll()  # select takes no descriptors above 1,023
        poll.register(self._link, select.POLLIN)
        poll.poll(1000 * timeout_s)

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
        if not isinstance(message, Place):
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
        _kill(self._pid_fd)


def _kill(pid_fd: list[int]) -> None:
    for each in pid_fd:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(each, signal.SIGKILL)


def _end(link: socket.socket, pid_fd: list[int]) -> None:
    """End a process that nobody needs any more."""
    _kill(pid_fd)
    link.close()
    for each in pid_fd:
        os.close(each)


class Nursery:
    """Makes the processes. Safe to use from several threads."""

    def __init__(self, command: Sequence[str]) -> None:
        """command: what to run. It gets a socket as standard input, and for each descriptor that
        arrives there, forks a process that talks over it."""
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
            try:
                self._send(theirs.fileno())
            except OSError as error:
                ours.close()
                raise RequestError(
                    f"The process that makes grammars cannot be started: {error.strerror}.",
                    status_code=503,
                ) from None
            finally:
                theirs.close()
            process = GrammarProcess(ours)
            self._living.add(process)
            return process

    def _send(self, descriptor: int) -> None:
        if self._parent is None or self._parent.poll() is not None:  # it has crashed
            self._start()
        assert self._control is not None
        socket.send_fds(self._control, [b"."], [descriptor])

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
