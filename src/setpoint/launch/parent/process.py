"""Starts an engine process, gives it its job, watches it and ends it. This module knows the process
and the line for its messages, but not what they mean.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from setpoint.core.errors import SetpointError
from setpoint.core.process_state import is_stopped
from setpoint.launch.deadline import RANK_LOST, SIGNALS
from setpoint.launch.heartbeat import STACKS
from setpoint.launch.own_gpus import with_gpus
from setpoint.launch.parent.watchdog import until_silent

if TYPE_CHECKING:
    import psutil

    from setpoint.ipc.line import EngineLine, EngineLink
    from setpoint.launch.job import EngineJob

OPENMP_SPINS = "1000"
"""Number of rounds (some hundredths of a millisecond) for which an OpenMP thread of the engine
spins before it sleeps, if it has no work.

The default of 300,000 keeps a core busy while the thread that has the work waits for a core: with
other busy processes on two cores, a stream decoded many times slower. On an idle machine 1,000
rounds cost nothing that could be measured (docs/notebook.md).
"""
USELESS_S = 1.0
"""How long a process may run after its line has ended by itself."""
STACKS_S = 1.0
"""How long an engine that hangs may take to write the stacks of its threads."""
LAST_WORDS_S = 0.2
"""How long to wait for the last messages of an engine process that has ended."""


logger = logging.getLogger(__name__)


class StartupError(SetpointError):
    """The engine process has ended or never became ready; the message holds the process's own
    words."""


class EngineProcess(Protocol):
    """A process that runs one engine, as its supervisor sees it. It starts at once and waits for
    its job; the code that started it must end it."""

    @property
    def pid(self) -> int | None:
        """The id of the process; None while it is not known yet."""
        ...

    def open_link(self) -> EngineLink:
        """This process's end of the link, which carries messages from the start on; called
        once."""
        ...

    def hand_over(self, job: EngineJob) -> None:
        """Send the engine its job. Raises StartupError if it has ended already."""
        ...

    async def watch(self, line: EngineLine, *, watchdog_s: float) -> None:
        """Report to the line what happens to the process, until the process has ended. Kill the
        process if its loop hangs for ``watchdog_s``, or if it outlives its line."""
        ...

    def kill(self) -> None:
        """End the process at once."""
        ...

    def end(self) -> None:
        """End the process at once, and close what belongs to it."""
        ...


class Watched(Protocol):
    """What is done with a process that is watched. Its pid is known."""

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        ...

    def write_stacks(self) -> None:
        """Have it write the stacks of its threads."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


Spawn = Callable[[int], EngineProcess]
"""A function that starts the process of an engine, whose number (--dp-size) it gets."""


@dataclass(slots=True, frozen=True)
class ChildProcess:
    """An engine in a child of this process; see EngineProcess."""

    popen: subprocess.Popen[bytes]
    link: socket.socket

    @property
    def pid(self) -> int:
        return self.popen.pid

    def open_link(self) -> EngineLink:
        from setpoint.ipc.link import SocketLink

        return SocketLink(self.link)

    def hand_over(self, job: EngineJob) -> None:
        """Leaves the pipe open: when it closes, the engine knows that this process is gone."""
        from setpoint.launch.job import encode_job  # with numpy, which no spawn has to wait for

        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(encode_job(job))
            self.popen.stdin.flush()
        except BrokenPipeError:
            raise StartupError(f"The engine process {_ending(self.popen.wait())}.") from None

    async def watch(self, line: EngineLine, *, watchdog_s: float) -> None:
        await until_reported(self._follow(line), line, self, watchdog_s=watchdog_s)

    def _follow(self, line: EngineLine) -> asyncio.Future[int]:
        """The exit code, once the process has ended. Until then the line hears when it is stopped
        and when it continues."""
        code: Future[int] = Future()
        process, loop = self.popen, asyncio.get_running_loop()

        def follow() -> None:
            while (change := _next_change(process.pid)) in (os.CLD_STOPPED, os.CLD_CONTINUED):
                with suppress(RuntimeError):  # the loop may be closed by now
                    loop.call_soon_threadsafe(line.suspended, change == os.CLD_STOPPED)
            code.set_result(process.wait())

        # Not a thread of an executor: an interpreter that exits without ending the engine would
        # wait for that thread first.
        threading.Thread(target=follow, daemon=True).start()
        return asyncio.wrap_future(code)

    def is_stopped(self) -> bool:
        return is_stopped(self.pid) or any(is_stopped(rank.pid) for rank in ranks_of(self.pid))

    def write_stacks(self) -> None:
        self.popen.send_signal(STACKS)
        for rank in ranks_of(self.pid):
            rank.send_signal(STACKS)

    def kill(self) -> None:
        kill_with_children(self.popen)

    def end(self) -> None:
        self.kill()
        self.popen.wait()
        assert self.popen.stdin is not None
        with suppress(BrokenPipeError):  # a job that was never read
            self.popen.stdin.close()
        self.link.close()


def spawn_child(
    gpus: Sequence[int] | None,
    *,
    num_ranks: int,
    stderr: int | None,
    inherits: Sequence[int] = (),
) -> ChildProcess:
    """Start an engine process. SIGINT and SIGTERM are blocked from its first instruction on: it
    ends when this process tells it to, or when this process ends. gpus: see
    ``engine_environment``. num_ranks: how many compute its model together. stderr: the descriptor
    for its log, if not this process's. inherits: further descriptors that it gets
    (``launch.lockstep_memory``)."""
    link, theirs = socket.socketpair()
    with theirs:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            popen = subprocess.Popen(
                [
                    *(sys.executable, "-m", "setpoint.launch.child"),
                    *map(str, (theirs.fileno(), num_ranks, *inherits)),
                ],
                stdin=subprocess.PIPE,
                stderr=stderr,
                env=engine_environment(gpus),
                pass_fds=[theirs.fileno(), *inherits],
            )
        except BaseException:
            link.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return ChildProcess(popen, link)


def engine_environment(gpus: Sequence[int] | None = None) -> dict[str, str]:
    """This process's environment, with OPENMP_SPINS unless the user has set how OpenMP threads
    wait. gpus: numbers of the visible NVIDIA GPUs that the engine is to use; None: those that this
    process may use, from the first on."""
    environ = dict(os.environ)
    if not environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        environ["GOMP_SPINCOUNT"] = OPENMP_SPINS
    return environ if gpus is None else with_gpus(environ, gpus)


async def until_reported(
    ended: asyncio.Future[int], line: EngineLine, process: Watched, *, watchdog_s: float
) -> None:
    """Like ``until_over``, for a process about which only its exit code is known; reports it to the
    line."""
    await until_over(ended, line, process, watchdog_s=watchdog_s)
    await asyncio.sleep(LAST_WORDS_S)
    number = ended.result()
    line.died(
        f"The engine process {_ending(number)}.", was_killed=number in (-signal.SIGKILL, RANK_LOST)
    )


async def until_over(
    ended: asyncio.Future[int], line: EngineLine, process: Watched, *, watchdog_s: float
) -> None:
    """Wait for the end of a process. End it if its loop hangs for ``watchdog_s``, or if it outlives
    its line. ended: done when the process has ended."""
    dead: asyncio.Future[bool] = asyncio.ensure_future(line.dead.wait())
    silent = asyncio.create_task(until_silent(process.is_stopped, line, watchdog_s))
    try:
        await asyncio.wait((ended, dead, silent), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        dead.cancel()
        silent.cancel()
        raise
    if silent.done() and not ended.done():
        hung = f"The engine has not finished a step for {watchdog_s:g} s (--watchdog-timeout)."
        logger.error(
            "Watchdog timeout: the stacks of the threads of engine %s follow. %s", line.label, hung
        )
        process.write_stacks()
        await asyncio.wait([ended], timeout=STACKS_S)
        line.died(hung)
        process.kill()
    elif dead.done():
        await asyncio.wait([ended], timeout=USELESS_S)
        process.kill()
    dead.cancel()
    silent.cancel()
    await asyncio.wait([ended])


def ranks_of(pid: int) -> list[psutil.Process]:
    """The other ranks of an engine (``launch.ranks``), whose process has this id."""
    import psutil

    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with suppress(psutil.NoSuchProcess):
                if "setpoint.launch.child.rank" in child.cmdline():
                    found.append(child)
    return found


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a child and all its descendants."""
    import psutil

    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        kill_tree(psutil.Process(process.pid))
    process.kill()


def kill_tree(top: psutil.Process) -> None:
    """Send SIGKILL to a process and all its descendants: compilers would otherwise outlive the
    process that started them. Raises psutil.NoSuchProcess if it has ended."""
    import psutil

    top.suspend()  # a stopped process starts no further children
    for child in top.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    top.kill()


def _ending(code: int) -> str:
    if code == RANK_LOST:
        return "has lost another rank of its model; the log above says why"
    if code >= 0:
        return f"ended with exit code {code}; its output above says why"
    name = signal.Signals(-code).name
    advice = (
        "; if nobody sent that signal, the machine probably ran out of memory: lower"
        " --max-total-tokens or --mem-fraction-static"
        if name == "SIGKILL"
        else ""
    )
    return f"was ended by {name}{advice}"


def _next_change(pid: int) -> int | None:
    """Wait until the child stops (os.CLD_STOPPED), continues (os.CLD_CONTINUED) or ends (anything
    else; it is left to be reaped)."""
    changes = os.WSTOPPED | os.WCONTINUED
    try:
        while True:
            found = os.waitid(os.P_PID, pid, os.WEXITED | changes | os.WNOWAIT)
            if found is None or found.si_code not in (os.CLD_STOPPED, os.CLD_CONTINUED):
                return None if found is None else found.si_code
            # The process may have changed again since then: what is taken now is what counts.
            taken = os.waitid(os.P_PID, pid, changes | os.WNOHANG)
            if taken is not None:
                return taken.si_code
    except ChildProcessError:  # other code has reaped it
        return None
