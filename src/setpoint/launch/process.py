"""The life of an engine process as its parent sees it: started, given its job, watched, ended. It
knows the process and the line that its messages come on, but not what they mean.
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
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from setpoint.core.errors import SetpointError
from setpoint.launch.ending import SIGNALS
from setpoint.launch.heartbeat import STACKS
from setpoint.launch.watchdog import until_silent

if TYPE_CHECKING:
    from setpoint.ipc.line import EngineLine
    from setpoint.launch.job import EngineJob

OPENMP_SPINS = "1000"
"""How many rounds (some hundredths of a millisecond) an OpenMP thread of the engine spins for its
next piece of work before it sleeps.

The default of 300,000 keeps a core busy while the thread that has the work waits for a core: with
other busy processes on two cores, a stream decoded many times slower. On an idle machine 1,000
rounds cost nothing that could be measured (docs/notebook.md).
"""
USELESS_S = 1.0
"""How long a process may run on after its line has ended by itself."""
STACKS_S = 1.0
"""How long an engine that hangs has to write the stacks of its threads."""
LAST_WORDS_S = 0.2
"""How long to wait for the last messages of an engine process that has ended."""


logger = logging.getLogger(__name__)


class StartupError(SetpointError):
    """The engine process ended, or never became ready; the message has its own words."""


@dataclass(slots=True, frozen=True)
class EngineProcess:
    """An engine process and its link."""

    popen: subprocess.Popen[bytes]
    link: socket.socket
    """This process's end."""
    theirs: int
    """Descriptor of the engine's end, in the engine."""

    def end(self) -> None:
        """End the process at once, and close what belongs to it."""
        kill_with_children(self.popen)
        self.popen.wait()
        assert self.popen.stdin is not None
        with suppress(BrokenPipeError):  # a job that was never read
            self.popen.stdin.close()
        self.link.close()


def spawn_engine(stderr: int | None, *, gpu: int | None = None) -> EngineProcess:
    """Start an engine process. SIGINT and SIGTERM are blocked from its first instruction on: it
    ends when this process tells it to, or when this process ends. gpu: see
    ``engine_environment``."""
    command = [sys.executable, "-m", "setpoint.launch"]
    link, theirs = socket.socketpair()
    with theirs:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stderr=stderr,
                env=engine_environment(gpu=gpu),
                pass_fds=[theirs.fileno()],
            )
        except BaseException:
            link.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return EngineProcess(popen, link, theirs.fileno())


def engine_environment(*, gpu: int | None = None) -> dict[str, str]:
    """This process's environment, with OPENMP_SPINS unless the user has set how OpenMP's threads
    wait. gpu: which of the visible NVIDIA GPUs the engine is to see; None: all."""
    environ = dict(os.environ)
    if not environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        environ["GOMP_SPINCOUNT"] = OPENMP_SPINS
    if gpu is not None:
        visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        environ["CUDA_VISIBLE_DEVICES"] = visible[gpu] if gpu < len(visible) else str(gpu)
    return environ


def hand_over(process: subprocess.Popen[bytes], job: EngineJob) -> None:
    """Send the engine its job. The pipe stays open: when it closes, the engine knows that this
    process is gone."""
    from setpoint.launch.job import encode_job  # with numpy, which no spawn has to wait for

    assert process.stdin is not None
    try:
        process.stdin.write(encode_job(job))
        process.stdin.flush()
    except BrokenPipeError:
        raise StartupError(f"The engine process {_ending(process.wait())}.") from None


async def watch(process: subprocess.Popen[bytes], line: EngineLine, *, watchdog_s: float) -> None:
    """Report what happens to the process to its line, until the process has ended. A process whose
    loop hangs for ``watchdog_s`` is killed, and so is one that outlives its line."""
    code: Future[int] = Future()
    loop = asyncio.get_running_loop()

    def follow() -> None:
        while (change := _next_change(process.pid)) in (os.CLD_STOPPED, os.CLD_CONTINUED):
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(line.suspended, change == os.CLD_STOPPED)
        code.set_result(process.wait())

    # Not a thread of an executor: an interpreter that exits without ending the engine would wait
    # for that thread first.
    threading.Thread(target=follow, daemon=True).start()
    ended: asyncio.Future[int] = asyncio.wrap_future(code)
    dead: asyncio.Future[bool] = asyncio.ensure_future(line.dead.wait())
    silent = asyncio.create_task(until_silent(process.pid, line, watchdog_s))
    await asyncio.wait((ended, dead, silent), return_when=asyncio.FIRST_COMPLETED)
    if silent.done() and not ended.done():
        hung = f"The engine has not finished a step for {watchdog_s:g} s (--watchdog-timeout)."
        logger.error("Watchdog timeout: the stacks of the engine's threads follow. %s", hung)
        process.send_signal(STACKS)
        await asyncio.wait([ended], timeout=STACKS_S)
        line.died(hung)
        kill_with_children(process)
    elif dead.done():
        await asyncio.wait([ended], timeout=USELESS_S)
        kill_with_children(process)
    dead.cancel()
    silent.cancel()
    await ended
    await asyncio.sleep(LAST_WORDS_S)
    number = code.result()
    line.died(f"The engine process {_ending(number)}.", was_killed=number == -signal.SIGKILL)


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a process and all its descendants: compilers would go on after the process
    that started them."""
    import psutil

    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        top.suspend()  # a stopped process starts no further children
        for child in top.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()


def _ending(code: int) -> str:
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
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOWAIT)
        if found is not None and found.si_code in (os.CLD_STOPPED, os.CLD_CONTINUED):
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
    except ChildProcessError:  # other code has reaped it
        return None
    return None if found is None else found.si_code
