"""SIGTERM ends a server, whatever hangs in it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    free_port,
    running_server,
    wait_until,
)

HANGS = {
    "a thread of an executor": "ThreadPoolExecutor(1).submit(forever)",
    "the event loop": "loop().call_soon_threadsafe(forever)",
    "a task that waits for a thread": (
        "asyncio.run_coroutine_threadsafe(asyncio.to_thread(forever), loop())"
    ),
    "an exit handler": "atexit.register(forever)",
    "a thread that the interpreter waits for": "threading.Thread(target=forever).start()",
}
"""What hangs, and the Python that makes it hang in the server's own process."""
CUSTOMIZED = """
import sys

if "setpoint.cli" in sys.orig_argv:
    import signal

    def hang(number, frame):
        import asyncio, atexit, threading, time
        from concurrent.futures import ThreadPoolExecutor

        def forever():
            while True:
                time.sleep(0.01)

        def loop():
            waiting = frame
            while waiting.f_code.co_qualname != "_Run.result":
                waiting = waiting.f_back
            return waiting.f_locals["self"]._loop

        {hang}

    signal.signal(signal.SIGUSR2, hang)
"""


def ends(server: ServerProcess) -> None:
    """The server ends after SIGTERM, and with it every process that it has started."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    server.process.send_signal(signal.SIGTERM)
    server.wait_end()
    assert not psutil.wait_procs(children, timeout=PATIENCE_S)[1]


@contextmanager
def serving(
    folder: Path, model: Path, *arguments: str, **options: object
) -> Iterator[ServerProcess]:
    with running_server(
        folder,
        *("--model-path", str(model), "--dtype", "float32", "--skip-server-warmup"),
        *("--drain-timeout", "1", *arguments),
        **options,
    ) as server:
        yield server


QUICK_HANG, *OTHER_HANGS = HANGS


@pytest.mark.parametrize(
    "hang",
    [QUICK_HANG, *(pytest.param(each, marks=pytest.mark.full) for each in OTHER_HANGS)],
)
def test_whatever_hangs_in_the_server(tiny_model: Path, tmp_path: Path, hang: str) -> None:
    """Red before: each of them kept the process for ever."""
    (tmp_path / "sitecustomize.py").write_text(CUSTOMIZED.format(hang=HANGS[hang]))
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with serving(tmp_path, tiny_model, env=env) as server:
        server.process.send_signal(signal.SIGUSR2)
        ends(server)
        assert "did not end in time" in server.errors
        assert "in forever" in server.errors, "the log shows what hangs"


def test_an_engine_that_hangs(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, tiny_model) as server:
        assert server.engine is not None
        server.engine.send_signal(signal.SIGSTOP)
        ends(server)


@pytest.mark.full
def test_a_template_that_hangs(tiny_model: Path, tmp_path: Path) -> None:
    """Every process of the template is stopped. Red before: the chats that waited for it were cut
    off without an answer, or with a traceback in the log."""
    with serving(tmp_path, tiny_model) as server:
        assert server.engine is not None
        whole, engine = psutil.Process(server.process.pid), server.engine.pid
        is_stopped, over = threading.Event(), threading.Event()

        def stop() -> None:
            while not over.wait(0.001):
                with suppress(psutil.Error):
                    for each in whole.children():
                        if each.pid != engine:
                            each.suspend()
                            is_stopped.set()

        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
        answers: list[httpx.Response] = []

        def ask() -> None:
            url = f"{server.url}/v1/chat/completions"
            answers.append(httpx.post(url, json=body, timeout=2 * PATIENCE_S))

        threads = [threading.Thread(target=each, daemon=True) for each in (stop, ask, ask, ask)]
        threads[0].start()
        assert is_stopped.wait(PATIENCE_S)
        for each in threads[1:]:
            each.start()
        is_open = psutil.CONN_ESTABLISHED
        wait_until(lambda: [each.status for each in whole.net_connections()].count(is_open) >= 3)
        try:
            ends(server)
        finally:
            over.set()
        for each in threads:
            each.join(PATIENCE_S)
        assert [answer.status_code for answer in answers] == [503] * 3
        for answer in answers:  # a busy machine may take long enough to try both processes
            assert "shutting down" in answer.text or "stopped by a signal" in answer.text
        assert "Traceback" not in server.errors


@pytest.mark.full
def test_a_collector_that_never_answers(tiny_model: Path, tmp_path: Path) -> None:
    """Red before: up to half a minute, when a pod has long been killed."""
    with socket.create_server(("127.0.0.1", 0)) as collector:
        address = f"127.0.0.1:{collector.getsockname()[1]}"
        with serving(
            tmp_path, tiny_model, "--enable-trace", "--otlp-traces-endpoint", address
        ) as server:
            server.generate(text="a", sampling_params={"max_new_tokens": 2})
            ends(server)
            assert "The last spans could not be sent in time" in server.errors
            assert "is started again" not in server.errors, "the engine has been asked to end"


@pytest.mark.full
def test_a_log_that_nobody_reads(tiny_model: Path, tmp_path: Path) -> None:
    """Its pipe is full from the start. Red before: the first line waited for ever."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "setpoint.cli", "serve", "--model-path", str(tiny_model)),
        *("--port", str(port), "--drain-timeout", "1", "--log-level", "debug"),
    ]

    def answers() -> bool:
        body = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
        try:
            return httpx.post(f"http://127.0.0.1:{port}/generate", json=body).status_code == 200
        except httpx.HTTPError:
            return False

    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "wb") as unread:
        os.set_blocking(writing, False)
        try:
            while True:
                os.write(writing, bytes(1 << 12))
        except BlockingIOError:
            pass
        os.set_blocking(writing, True)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=unread
        )
        try:
            wait_until(answers)
            started = psutil.Process(process.pid).children()
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
            assert not psutil.wait_procs(started, timeout=PATIENCE_S)[1]
        finally:
            process.kill()
            process.wait()
