"""Real ``setpoint serve`` processes for tests: started on a free port, watched through their log,
always ended by pid."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

READY = "The server is fired up and ready to roll!"
PATIENCE_S = 60.0
"""Time limit for anything that a healthy server does at once; generous, because other work may share
the machine."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def free_ports(count: int) -> int:
    """The first of so many consecutive ports that are free."""
    while True:
        first = free_port()
        with suppress(OSError, OverflowError), ExitStack() as taken:
            for port in range(first, first + count):
                taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def wait_until(
    holds: Callable[[], Any], *, timeout_s: float = PATIENCE_S, every_s: float = 0.02
) -> float:
    """Poll until ``holds()`` is true; returns the seconds it took. Raises AssertionError after
    ``timeout_s``."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s:g} s"
        time.sleep(every_s)
    return time.monotonic() - started


def engines_of(pid: int) -> list[psutil.Process]:
    """The engine processes of a server that live. (Its other child renders the chat template.)"""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            if (
                "setpoint.launch.child" in child.cmdline()
                and child.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(child)
    return found


def engine_of(pid: int) -> psutil.Process:
    """The engine process of a server, which must have one."""
    (engine,) = engines_of(pid)
    return engine


def stop_next_engine(pid: int, before: set[int]) -> int:
    """Wait for an engine process of a server that is none of these, and stop it (SIGSTOP) before it
    can become ready; returns its pid."""
    found: list[int] = []

    def has_come() -> bool:
        found.extend(each.pid for each in engines_of(pid) if each.pid not in before)
        return bool(found)

    wait_until(has_come, timeout_s=2 * PATIENCE_S, every_s=0.005)
    os.kill(found[0], signal.SIGSTOP)
    return found[0]


class ServerProcess:
    """One server. ``errors`` is everything that it wrote to stderr so far (its log), ``output`` its
    stdout."""

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        *,
        port: int | None = None,
        env: dict[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self._paths = folder / "stdout.txt", folder / "stderr.txt"
        command = [
            python,
            "-m",
            "setpoint.cli",
            "serve",
            "--port",
            str(self.port),
            *arguments,
        ]
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **(env or {})},
            )
        self.engine: psutil.Process | None = None
        """Set once the server is ready."""

    @property
    def output(self) -> str:
        return self._paths[0].read_text(errors="replace")

    @property
    def errors(self) -> str:
        return self._paths[1].read_text(errors="replace")

    @property
    def messages(self) -> list[str]:
        """The lines of ``errors`` without their time stamps."""
        return [re.sub(r"^\[[^]]*\] ", "", line) for line in self.errors.splitlines()]

    def wait_ready(self, *, timeout_s: float = 120.0) -> None:
        wait_until(
            lambda: READY in self.errors or self.process.poll() is not None, timeout_s=timeout_s
        )
        assert self.process.poll() is None, self.errors
        self.engine = engines_of(self.process.pid)[0]

    def wait_end(self, *, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end of the process; returns the exit code."""
        return self.process.wait(timeout_s)

    def engine_is_gone(self) -> bool:
        assert self.engine is not None
        return not self.engine.is_running() or self.engine.status() == psutil.STATUS_ZOMBIE

    def state(self) -> dict[str, Any]:
        """The engine's ``internal_states`` entry: num_running, num_queued, pool, …"""
        return dict(
            httpx.get(f"{self.url}/server_info", timeout=PATIENCE_S).json()["internal_states"][0]
        )

    def is_idle(self) -> bool:
        """Nothing runs or waits, and the whole pool is free or evictable."""
        state = self.state()
        pool = state["pool"]
        return (
            state["num_running"] == state["num_queued"] == 0
            and pool["free"] + pool["evictable"] == pool["total"]
        )

    def generate(self, **body: Any) -> Any:
        response = httpx.post(f"{self.url}/generate", json=body, timeout=PATIENCE_S)
        assert response.status_code == 200, response.text
        return response.json()

    def end(self) -> None:
        """End the server and its engine process, whatever state they are in, by force if needed."""
        if self.process.poll() is None:
            for patience_s in (5, 30):  # the second signal ends what still runs
                self.process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(patience_s)
                    break
            else:
                self.process.kill()
                self.process.wait()
        if self.engine is not None and not self.engine_is_gone():
            self.engine.kill()


@contextmanager
def running_server(
    folder: Path, *arguments: str, ready: bool = True, **options: Any
) -> Iterator[ServerProcess]:
    """Yields a server that is ready to answer, and ends it afterwards. folder: for its output."""
    folder.mkdir(parents=True, exist_ok=True)
    server = ServerProcess(folder, list(arguments), **options)
    try:
        if ready:
            server.wait_ready()
        yield server
    finally:
        server.end()
