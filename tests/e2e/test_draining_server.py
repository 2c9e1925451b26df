"""SIGTERM: the server says that it drains, finishes what it can, and ends what it cannot."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint_testing.server_process import PATIENCE_S, ServerProcess, running_server, wait_until

ENDLESS = {"max_new_tokens": 4000, "temperature": 0, "ignore_eos": True, "n": 256}
"""Some minutes of work for the tiny model."""


class Stream(threading.Thread):
    """Reads a stream of /generate in the background."""

    def __init__(self, server: ServerProcess, sampling: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url = f"{server.url}/generate"
        self._body = {"text": "a", "stream": True, "sampling_params": sampling}
        self.chunks: list[dict[str, Any]] = []
        self.end = ""
        self.start()
        wait_until(lambda: self.chunks)

    def run(self) -> None:
        timeout = httpx.Timeout(10 * PATIENCE_S)
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=timeout) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self.chunks.append(json.loads(line.removeprefix("data: ")))
                    else:
                        self.end = line or self.end
        except httpx.HTTPError as error:
            self.end = type(error).__name__

    def finish_reasons(self) -> list[str]:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        finished = [chunk["meta_info"]["finish_reason"] for chunk in self.chunks]
        return [reason["type"] for reason in finished if reason]


@contextmanager
def serving(model: Path, folder: Path, *arguments: str) -> Iterator[ServerProcess]:
    """Its streams are few bytes, so that a client on a busy machine keeps up."""
    with running_server(
        folder,
        *("--model-path", str(model), "--dtype", "float32", "--incremental-streaming-output"),
        *("--stream-interval", "20", *arguments),
    ) as server:
        yield server


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_a_drain_from_its_beginning_to_its_end(
    tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Red before: the port was closed at once, and five seconds later the streams had an error in
    place of a finish reason."""
    with serving(tiny_model, tmp_path, "--drain-timeout", "8") as server:
        stream = Stream(server, ENDLESS)
        before = len(stream.chunks)
        server.process.send_signal(number)
        wait_until(lambda: httpx.get(f"{server.url}/ready", timeout=PATIENCE_S).status_code == 503)
        assert httpx.get(f"{server.url}/ready", timeout=PATIENCE_S).text == "draining\n"
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 503
        refused = httpx.post(f"{server.url}/generate", json={"text": "b"}, timeout=PATIENCE_S)
        assert refused.status_code == 503
        assert "draining" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        wait_until(lambda: len(stream.chunks) > before + 100)
        assert stream.finish_reasons() == ["abort"] * 256
        assert stream.end == "data: [DONE]"
        assert server.wait_end() == 0
        assert server.engine_is_gone()
        assert "Draining: 256 requests run and have 8 s to end" in server.errors
        assert "256 requests were still running and are aborted." in server.errors
        assert "Traceback" not in server.errors
        assert "ERROR" not in server.errors


@pytest.mark.full
def test_what_ends_in_time_ends_as_always(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path, "--drain-timeout", "600") as server:
        stream = Stream(server, {"max_new_tokens": 1000, "temperature": 0, "ignore_eos": True})
        server.process.send_signal(signal.SIGTERM)
        assert stream.finish_reasons() == ["length"]
        assert "Draining: 1 request runs and has 600 s to end" in server.errors
        assert sum(len(chunk["output_ids"]) for chunk in stream.chunks) == 1000
        assert server.wait_end() == 0
        assert "aborted" not in server.errors


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_a_second_signal_ends_at_once(
    tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with serving(tiny_model, tmp_path, "--drain-timeout", "600") as server:
        stream = Stream(server, ENDLESS)
        server.process.send_signal(number)
        wait_until(lambda: httpx.get(f"{server.url}/ready", timeout=PATIENCE_S).status_code == 503)
        server.process.send_signal(number)
        assert server.wait_end() == 0
        stream.join(PATIENCE_S)
        assert not stream.is_alive()
        assert "A second signal" in server.errors
        assert "Traceback" not in server.errors


@pytest.mark.full
def test_the_time_may_change_while_the_server_runs(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path, "--drain-timeout", "600") as server:
        body = {"server_args": {"drain_timeout": 0}}
        assert (
            httpx.post(
                f"{server.url}/set_internal_state", json=body, timeout=PATIENCE_S
            ).status_code
            == 200
        )
        stream = Stream(server, ENDLESS)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        assert stream.finish_reasons() == ["abort"] * 256
