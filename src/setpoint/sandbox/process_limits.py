"""Limits that a process sets for itself, and what the way in which it ended says about them.

Code that runs in C cannot be interrupted from within Python. So nothing handles the signal of the
timer here: the kernel ends the process.
"""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from setpoint.core.process_state import is_stopped

OUT_OF_MEMORY = 3
"""Exit code of a process that has caught its MemoryError."""
STOPPED_S = 1.0
"""How long a process may be stopped by a signal (SIGSTOP) until it counts as ended. It keeps its
answer and what it has locked, and nobody knows whether it will ever go on."""
_ITS_OWN = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGSYS,
    signal.SIGTRAP,
}
"""The signals of a crash, which the work itself brings about."""


class ProcessLimits(NamedTuple):
    cpu_s: float
    """CPU time for one job."""
    memory_bytes: int
    """Address space of the process, with the interpreter's 50 MiB."""
    wall_s: float = 60.0
    """Time after which nobody waits for an answer any longer, whatever holds the process up."""


def limit_memory(kind: int, num_bytes: int) -> None:
    """Limit this process, now and for ever. kind: of ``resource``. It leaves no core file, which
    would have a client's words in it."""
    resource.setrlimit(kind, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def limited_time(cpu_s: float) -> Iterator[None]:
    """The kernel ends this process if the block computes for longer."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


class Ending(NamedTuple):
    """How a process ended."""

    why: str
    """The rest of a sentence that begins with "it"."""
    is_its_own: bool
    """Whether its work ended it, and would end the next process, too. Otherwise somebody else did:
    a person, or a machine that is out of memory."""


def ending(code: int, *, cpu_s: float, memory_bytes: int) -> Ending:
    """code: as ``subprocess`` has it, negative for a signal."""
    if code == -signal.SIGPROF:
        return Ending(f"computes for more than {cpu_s:g} s", True)
    if code == OUT_OF_MEMORY:
        return Ending(f"needs more than {memory_bytes >> 20} MiB of memory", True)
    if code >= 0:
        return Ending(f"ends its process with exit code {code}", True)
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    if -code in _ITS_OWN:
        return Ending(f"crashes its process ({name})", True)
    return Ending(f"was ended by {name}", False)


STOPPED = Ending("was stopped by a signal (SIGSTOP)", False)


class StopDetector:
    """Notices that a process is stopped, by looking again and again."""

    def __init__(self) -> None:
        self._since: float | None = None

    def lasts(self, pid: int) -> bool:
        """Whether the process has been stopped for ``STOPPED_S``, as far as the looks tell."""
        if not is_stopped(pid):
            self._since = None
            return False
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now - self._since >= STOPPED_S
