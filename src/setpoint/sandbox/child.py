"""A child process that answers jobs under limits, and is replaced when it has ended.

Contract: a job that exceeds a limit, or crashes the child, ends that child and nothing else. A
child that somebody else has ended, or stopped, is replaced, and the job is tried once more, so that
only a machine that ends children again and again is noticed.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from setpoint.core.framing import Unpacker, framed
from setpoint.sandbox.process_limits import STOPPED, STOPPED_S, ProcessLimits, StopDetector, ending

_CHUNK = 1 << 20
_OURS = (signal.SIGINT, signal.SIGTERM)
"""Blocked in children: Ctrl-C reaches every process of a terminal, but these end with their
parent."""


CLOSED = "has ended, because the server is shutting down"


class TooMuchError(Exception):
    """The job exceeds a limit, or crashes the child. The message says how; the rest of a sentence
    that begins with "it"."""


class ChildLostError(Exception):
    """There is no answer, and the job is not to blame. The message says why; the rest of a sentence
    that begins with "it"."""


class LimitedChild:
    """See the module. Safe to use from several threads, one of which is served at a time."""

    def __init__(self, module: str, limits: ProcessLimits, *, opening: bytes | None = None) -> None:
        """module: what the child runs; its ``main`` calls ``worker.serve`` with the same limits.
        opening: the first job of every child."""
        self._command = (sys.executable, "-m", module)
        self._limits, self._opening = limits, opening
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while there is none."""
        return None if self._process is None else self._process.pid

    def open(self) -> bytes:
        """Start the child. Returns the answer to the opening. Raises TooMuchError and
        ChildLostError, and after these there is no child."""
        with self._lock:
            return self._tried(self._start)

    def ask(self, job: bytes, *, wall_s: float | None = None) -> bytes:
        """The answer to a job. wall_s: in place of the limit. Raises TooMuchError and
        ChildLostError."""

        def ask() -> bytes:
            if self._process is None or self._process.poll() is not None:
                self._end()  # no job is to blame for an end between two jobs
                self._start()
            return self._answer(job, self._limits.wall_s if wall_s is None else wall_s)

        with self._lock:
            return self._tried(ask)

    def close(self) -> None:
        """End the child, for ever. A thread that waits for an answer gets ChildLostError."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()  # it has no state to lose
        with self._lock:
            self._end()

    def _tried(self, act: Callable[[], bytes]) -> bytes:
        try:
            try:
                return act()
            except _EndedFromOutsideError:
                if self._is_closed:
                    raise ChildLostError(CLOSED) from None
            return act()
        except _EndedFromOutsideError as error:
            raise ChildLostError(str(error)) from None
        except BaseException:
            self._end()  # after a KeyboardInterrupt the answer would be taken for the next job's
            raise

    def _start(self) -> bytes:
        if self._is_closed:
            raise ChildLostError(CLOSED)
        self._link, theirs = socket.socketpair()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
        try:
            self._process = subprocess.Popen(
                self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL
            )
        except OSError as error:
            self._link.close()
            raise ChildLostError(f"cannot be started: {error.strerror}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        return b"" if self._opening is None else self._answer(self._opening, self._limits.wall_s)

    def _answer(self, job: bytes, wall_s: float) -> bytes:
        link, process = self._link, self._process
        assert link is not None
        assert process is not None
        unpacker, standstill, until = Unpacker(), StopDetector(), time.monotonic() + wall_s
        unsent = memoryview(framed(job))
        while True:
            left = until - time.monotonic()
            link.settimeout(max(min(left, STOPPED_S / 2), 1e-3))
            try:
                if unsent:
                    unsent = unsent[link.send(unsent) :]
                    continue
                data = link.recv(_CHUNK)
            except TimeoutError:
                if standstill.lasts(process.pid):
                    self._end()
                    raise _EndedFromOutsideError(STOPPED.why) from None
                if left <= 0:
                    self._end()
                    raise ChildLostError(f"gives no answer in {wall_s:g} s") from None
                continue
            except OSError:
                break  # it ended before it had read the job
            if not data:
                break
            for answer in unpacker.feed(data):
                return answer
        code = process.wait()
        self._end()
        how = ending(code, cpu_s=self._limits.cpu_s, memory_bytes=self._limits.memory_bytes)
        raise (TooMuchError if how.is_its_own else _EndedFromOutsideError)(how.why)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        assert self._link is not None
        self._link.close()


class _EndedFromOutsideError(Exception):
    """The child ended, or was ended, for a reason that is not in the job."""
