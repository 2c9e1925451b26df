"""Runs engines as actors of Ray (--use-ray). Ray starts the processes and reserves their cores in a
placement group; ``launch.parent.engine_session`` still decides when to start an engine again.

All engines run on this machine. The link is a pair of sockets, as for a child process. The actor
gets its end over a Unix socket in a folder that only this user can enter. Ray carries the job and
reports the end of an actor. Ray is imported on use, because few servers need it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from setpoint.config.hardware import probe_hardware
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError
from setpoint.launch.heartbeat import STACKS
from setpoint.launch.parent.process import (
    EngineProcess,
    Spawn,
    engine_environment,
    is_stopped,
    kill_tree,
    until_over,
)

if TYPE_CHECKING:
    from setpoint.ipc.line import EngineLine, EngineLink
    from setpoint.launch.job import EngineJob

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 100 << 20
"""Bytes of the object store of a Ray instance that this process starts. It holds only jobs, of a
few kilobytes each."""
PLACE_S = 20.0
"""How long Ray may take to find room for the engines."""
EXIT_S = 5.0
"""How long Ray may take to report that an actor that was killed has ended."""
PASSED_ON = ("GOMP_", "KMP_", "OMP_", "SETPOINT_", "TORCH", "XDG_", "CXX")
"""Prefixes of the environment variables that an engine gets. Others may be secrets, which Ray's
dashboard would show."""


@contextmanager
def ray_engines(options: Options) -> Iterator[Spawn]:
    """A context in which each engine has a reserved place on this machine, in the cluster at
    RAY_ADDRESS or in a Ray instance that this process starts. The exit releases everything. Raises
    ConfigError."""
    # Make Ray show every line of the engines' logs, even repeated ones, and without colours.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    num_engines = options.parallel.dp_size
    cores = options.execution.num_threads or probe_hardware().divided(num_engines).num_cores
    _connect(cores * num_engines)
    folder = Path(tempfile.mkdtemp(prefix="setpoint-ray-"))
    group = None
    try:
        here = f"node:{ray.util.get_node_ip_address()}"
        # In Ray, every node has a resource named after its address. To ask for a little of it is to
        # ask for a place on this node.
        group = placement_group([{"CPU": cores, here: 0.001}] * num_engines, strategy="PACK")
        if not group.wait(PLACE_S):
            free = ray.available_resources().get("CPU", 0)
            raise ConfigError(
                f"--use-ray: Ray does not have {num_engines} x {cores} free CPUs on this machine"
                f" ({free:g} are free in the cluster); give Ray more CPUs, or lower --dp-size or"
                " --num-threads."
            )
        logger.info("Ray has reserved %d CPUs for each engine (%d engines).", cores, num_engines)
        yield partial(_spawn, group=group, num_cpus=cores, folder=folder)
    finally:
        if group is not None:
            remove_placement_group(group)
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _connect(num_cpus: int) -> None:
    import ray

    address = os.environ.get("RAY_ADDRESS")
    if address is not None and "://" in address:
        raise ConfigError(
            f"--use-ray: RAY_ADDRESS is {address}, the address of a Ray client, but engines need"
            " a Ray node on this machine. Run `ray start --address=…` and use RAY_ADDRESS=auto."
        )
    # Ray installs its own handler for SIGTERM, but this program ends in its own order.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address is None:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                logging_level=logging.WARNING,
            )
        else:
            ray.init(logging_level=logging.WARNING)
    except Exception as error:
        where = "started" if address is None else f"reached at RAY_ADDRESS={address}"
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--use-ray: Ray could not be {where}: {reason}") from None
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


class EngineActor:
    """Runs in the actor's process and turns it into an engine process."""

    def __init__(self) -> None:
        # As in ``launch.child.__main__``: the objects of the engine's modules are never freed.
        gc.disable()
        from setpoint.launch.child import engine_process

        gc.freeze()
        gc.enable()
        self._module = engine_process

    def run(self, job: bytes, door: str) -> int:
        """Run the engine until it ends; returns its exit code. door: the Unix socket that gives
        this process its end of the link."""
        from setpoint.launch.job import decode_job

        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(door)
            _, (descriptor,), _, _ = socket.recv_fds(sock, 1, 1)
        return self._module.run(decode_job(job), descriptor)


def _spawn(gpu: int | None, *, group: Any, num_cpus: int, folder: Path) -> EngineProcess:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    environ = engine_environment(gpu=None)
    actor = (
        ray.remote(EngineActor)
        .options(
            num_cpus=num_cpus,
            max_restarts=0,  # the session starts the next one, with the then current options
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
            runtime_env={"env_vars": {k: v for k, v in environ.items() if k.startswith(PASSED_ON)}},
        )
        .remote()
    )
    return ActorProcess(actor, folder / f"{time.monotonic_ns()}")


class ActorProcess:
    """An engine in an actor; see EngineProcess."""

    def __init__(self, actor: Any, door: Path) -> None:
        self._actor = actor
        self._door = door
        self._ours, self._theirs = socket.socketpair()
        self._came: Future[psutil.Process] = Future()
        """The actor's process, once it has got its end of the link."""
        self._code: Future[int] | None = None
        """Its exit code, or an exception that says why there is none. None before it has its
        job."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(door))
        self._listener.listen(1)
        threading.Thread(target=self._let_in, daemon=True).start()

    @property
    def pid(self) -> int | None:
        return self._came.result().pid if self._came.done() else None

    def open_link(self) -> EngineLink:
        from setpoint.ipc.link import SocketLink

        return SocketLink(self._ours)

    def hand_over(self, job: EngineJob) -> None:
        from setpoint.launch.job import encode_job

        running = self._actor.run.remote(encode_job(job), str(self._door))
        self._code = running.future()

    async def watch(self, line: EngineLine, *, watchdog_s: float) -> None:
        assert self._code is not None
        ended: asyncio.Future[int] = asyncio.wrap_future(self._code)
        came: asyncio.Future[psutil.Process] = asyncio.wrap_future(self._came)
        dead: asyncio.Future[bool] = asyncio.ensure_future(line.dead.wait())
        await asyncio.wait((ended, came, dead), return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        if came.done():
            line.pid = came.result().pid
            await until_over(ended, line, self, watchdog_s=watchdog_s)
        else:
            self.kill()
            await asyncio.wait([ended])
        line.died(f"The engine's Ray actor {_ending(ended)}.")

    def is_stopped(self) -> bool:
        return is_stopped(self._came.result().pid)

    def write_stacks(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self._came.result().send_signal(STACKS)

    def kill(self) -> None:
        import ray

        if self._came.done():
            with suppress(psutil.NoSuchProcess):
                kill_tree(self._came.result())
        ray.kill(self._actor)

    def end(self) -> None:
        self.kill()
        if self._code is not None:
            with suppress(Exception):
                self._code.result(EXIT_S)
        with suppress(OSError):  # perhaps no process ever connected
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._theirs.close()
        self._ours.close()

    def _let_in(self) -> None:
        """Give the other end of the link to the first process that connects. Runs in a thread."""
        try:
            guest, _ = self._listener.accept()
        except OSError:  # ended before
            return
        with guest:
            pid = int.from_bytes(
                guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), "little"
            )
            process = psutil.Process(pid)
            socket.send_fds(guest, [b"\0"], [self._theirs.fileno()])
        # Now the link is cut as soon as the actor is gone.
        self._theirs.close()
        self._came.set_result(process)


def _ending(ended: asyncio.Future[int]) -> str:
    error = ended.exception()
    if error is None:
        return f"ended with exit code {ended.result()}; its output above says why"
    causes = [text.strip() for text in str(error).splitlines() if "is dead because" in text]
    reason = causes[0] if causes else str(error).partition("\n")[0]
    reason = reason.partition(" Worker exit detail")[0]
    return f"has died: {reason.removesuffix('.')}"
