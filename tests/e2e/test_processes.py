"""Signals and deaths: nothing hangs, nothing is left behind, and every end says why."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import httpx
import psutil
import pytest

from setpoint_testing.server_process import PATIENCE_S, ServerProcess, running_server, wait_until

LONG = {
    "text": "Once",
    "stream": True,
    "sampling_params": {"max_new_tokens": 3000, "temperature": 0, "ignore_eos": True},
}


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that ends with its engine."""
    with running_server(
        tmp_path,
        *("--model-path", str(tiny_model), "--skip-server-warmup", "--max-engine-restarts", "0"),
    ) as server:
        yield server


async def read_streams(server: ServerProcess, count: int, act: Callable[[], None]) -> list[str]:
    """Open ``count`` long streams, ``act()`` when all have begun; returns what each had received
    when it ended."""
    begun = 0

    async def one(session: aiohttp.ClientSession) -> str:
        nonlocal begun
        received = ""
        async with session.post(f"{server.url}/generate", json=LONG) as response:
            async for line in response.content:
                if not received:
                    begun += 1
                received = line.decode() if line.startswith(b"data: {") else received
        return received

    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(60), read_bufsize=1 << 22
    ) as session:
        tasks = [asyncio.create_task(one(session)) for _ in range(count)]
        while begun < count:
            await asyncio.sleep(0.01)
        act()
        return await asyncio.gather(*tasks)


def test_a_killed_engine_ends_streams_with_an_error_and_the_server_with_a_reason(
    server: ServerProcess,
) -> None:
    assert server.engine is not None
    last = asyncio.run(read_streams(server, 8, server.engine.kill))
    for chunk in last:
        assert json.loads(chunk.removeprefix("data: "))["error"]["message"].startswith(
            "The engine process was ended by SIGKILL"
        )
    assert server.wait_end() == 1
    assert server.messages[-1].startswith(
        "setpoint: error: The engine process was ended by SIGKILL"
    ), server.errors
    assert "Traceback" not in server.errors


def test_a_crash_of_native_code_leaves_the_stacks_of_the_engine(server: ServerProcess) -> None:
    assert server.engine is not None
    server.engine.send_signal(signal.SIGSEGV)
    assert server.wait_end() == 1
    assert "The engine process was ended by SIGSEGV" in server.errors
    assert "Fatal Python error: Segmentation fault" in server.errors


@pytest.mark.full
def test_a_crash_of_native_code_leaves_the_stacks_of_the_frontend(server: ServerProcess) -> None:
    server.process.send_signal(signal.SIGSEGV)
    server.wait_end()
    assert "Fatal Python error: Segmentation fault" in server.errors
    wait_until(server.engine_is_gone)


@pytest.mark.full
def test_sigterm_under_load_ends_in_order(server: ServerProcess) -> None:
    last = asyncio.run(read_streams(server, 8, lambda: server.process.send_signal(signal.SIGTERM)))
    assert server.wait_end() == 0
    assert all(
        "finish_reason" in chunk or "The engine is shutting down." in chunk for chunk in last
    )
    assert server.engine_is_gone()
    assert "Traceback" not in server.errors
    assert "ERROR" not in server.errors
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url, timeout=PATIENCE_S)


def test_the_engine_ends_with_its_parent(server: ServerProcess) -> None:
    asyncio.run(read_streams_until_killed(server))
    wait_until(server.engine_is_gone)


async def read_streams_until_killed(server: ServerProcess) -> None:
    with pytest.raises(aiohttp.ClientError):
        await read_streams(server, 4, server.process.kill)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        pytest.param("", signal.SIGINT, marks=pytest.mark.full),
        pytest.param("server_args", signal.SIGTERM, marks=pytest.mark.full),
        ("Load weight", signal.SIGINT),
    ],
)
def test_a_signal_during_start_up_leaves_no_traceback_and_no_process(
    tiny_model: Path, tmp_path: Path, words: str, number: signal.Signals
) -> None:
    """words: what the log has at that moment."""
    with running_server(tmp_path, "--model-path", str(tiny_model), ready=False) as server:
        wait_until(psutil.Process(server.process.pid).children)
        wait_until(lambda: words in server.errors)
        children = psutil.Process(server.process.pid).children()
        for process in (server.process, *children):  # a terminal sends it to the whole group
            process.send_signal(number)
        assert server.wait_end() == 0
        # A child may end a moment after its parent.
        assert not psutil.wait_procs(children, timeout=PATIENCE_S)[1]
        assert "Traceback" not in server.errors, server.errors


@pytest.mark.full
def test_a_start_that_is_called_off_does_not_complain_of_its_engine(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The engine is stopped for a moment, so that it starts no further process, and killed."""
    with running_server(tmp_path, "--model-path", str(tiny_model), ready=False) as server:
        wait_until(lambda: "server_args" in server.errors)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert "WARNING" not in server.errors


def _is_alive(process: psutil.Process) -> bool:
    """Also False for a process that has ended and is not collected yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.full
def test_somebody_impatient_gets_the_same_end(tiny_model: Path, tmp_path: Path) -> None:
    with running_server(tmp_path, "--model-path", str(tiny_model), ready=False) as server:
        wait_until(lambda: "server_args" in server.errors)
        children = psutil.Process(server.process.pid).children()
        while server.process.poll() is None:
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        assert server.wait_end() in (0, 130)  # 130: it was up already
        # A server that is interrupted in its last moment may leave its end to the children, which
        # notice it at once; then init has to collect them.
        wait_until(lambda: not any(_is_alive(child) for child in children))
        assert "Traceback" not in server.errors, server.errors


@pytest.mark.cases(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_compiler_outlives_a_server_that_ends_while_it_builds(
    number: signal.Signals, tiny_model: Path, tmp_path: Path
) -> None:
    """And whoever waits is told what for."""
    compiler = tmp_path / "slow-compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\nsleep 300\nexit 1\n')
    compiler.chmod(0o755)
    env = {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with running_server(tmp_path, "--model-path", str(tiny_model), ready=False, env=env) as server:
        wait_until(lambda: "compiling the C++ kernels for" in server.errors)
        compilers = [
            each
            for each in psutil.Process(server.process.pid).children(recursive=True)
            if each.name() in ("sleep", "slow-compiler")
        ]
        assert len(compilers) > 2
        server.process.send_signal(number)
        server.wait_end()
        wait_until(lambda: not any(_is_alive(each) for each in compilers), timeout_s=PATIENCE_S)
