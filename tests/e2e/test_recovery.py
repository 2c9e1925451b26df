"""Engines are ended while streams run: every stream goes on where it was, and is the same as in a run
that nobody disturbed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint.testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engines_of,
    running_server,
    wait_until,
)

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 40}},
    "required": ["a"],
}
LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "seed": 5, "stream": True}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {**LONG, "prompt": "abc", "temperature": 0}),
    "sampled": ("/v1/completions", {**LONG, "prompt": "abc", "temperature": 1}),
    "four": ("/v1/completions", {**LONG, "prompt": "abcd", "n": 4, "temperature": 1}),
    "penalties": (
        "/v1/completions",
        {**LONG, "prompt": "ab", "frequency_penalty": 0.5, "presence_penalty": 0.5},
    ),
    "logprobs": ("/v1/completions", {**LONG, "prompt": "xyz", "logprobs": 3}),
    "echo": ("/v1/completions", {**LONG, "prompt": "xyz", "logprobs": 1, "echo": True}),
    "stop strings": (
        "/v1/completions",
        {**LONG, "prompt": "stop", "temperature": 1, "stop": ["\x00\x01\x02\x03", "zzzz"]},
    ),
    "schema": (
        "/v1/chat/completions",
        {
            **LONG,
            "ignore_eos": False,
            "max_tokens": 600,
            "temperature": 1,
            "messages": [{"role": "user", "content": "numbers"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
            },
        },
    ),
    "native": (
        "/generate",
        {
            "text": "native",
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "sampling_params": {
                "max_new_tokens": 300,
                "ignore_eos": True,
                "temperature": 1,
                "sampling_seed": 3,
            },
        },
    ),
}


def stream(server: ServerProcess, name: str) -> Any:
    """The stream without what differs from run to run: for each choice its parts, joined."""
    path, body = STREAMS[name]
    if path.startswith("/v1"):
        body = {"model": "tiny", "stream_options": {"include_usage": True}, **body}
    choices: dict[int, dict[str, Any]] = {}
    with httpx.stream("POST", server.url + path, json=body, timeout=PATIENCE_S) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            if path == "/generate":
                chunk["meta_info"] = {
                    key: value
                    for key, value in chunk["meta_info"].items()
                    if "logprob" in key or "tokens" in key or key == "finish_reason"
                }
                choices = {0: chunk}  # the whole answer so far
                continue
            if chunk.get("usage"):
                choices[-1] = chunk["usage"]
            for choice in chunk["choices"]:
                found = choices.setdefault(choice["index"], {"text": "", "logprobs": [], "end": ""})
                found["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                if choice.get("logprobs"):
                    found["logprobs"].append(json.dumps(choice["logprobs"]["token_logprobs"])[1:-1])
                found["end"] = choice.get("finish_reason") or found["end"]
    for found in choices.values():
        if isinstance(found.get("logprobs"), list):
            found["logprobs"] = ", ".join(found["logprobs"])
    return choices


def streams(server: ServerProcess, disturb: Any) -> dict[str, Any]:
    """All streams at once, while ``disturb`` runs."""
    with ThreadPoolExecutor(2 * len(STREAMS)) as pool:
        running = {
            (name, copy): pool.submit(stream, server, name) for name in STREAMS for copy in range(2)
        }
        disturb(lambda: not all(future.done() for future in running.values()))
        found = {key: future.result(PATIENCE_S) for key, future in running.items()}
    for name in STREAMS:
        assert found[name, 0] == found[name, 1]
    return {name: found[name, 0] for name in STREAMS}


def outputs(server: ServerProcess) -> int:
    """How many tokens the running requests have."""
    state = server.state()
    return int(state["num_running_tokens"])


@pytest.fixture(scope="module", params=[1, 2])
def server(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with running_server(
        tmp_path_factory.mktemp("server"),
        *("--model-path", str(tiny_model), "--dtype", "float32", "--dp-size", str(request.param)),
        *("--max-engine-restarts", "100", "--num-threads", "1"),
    ) as server:
        server.num_engines = request.param
        yield server


def kill_and_wait(server: ServerProcess, rank: int, number: int) -> None:
    engine = engines_of(server.process.pid)[rank]
    os.kill(engine.pid, number)
    wait_until(
        lambda: (
            not engine.is_running() and len(engines_of(server.process.pid)) == server.num_engines
        ),
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_streams_go_on_when_their_engine_ends(server: ServerProcess, number: int) -> None:
    undisturbed = streams(server, lambda running: None)

    def disturb(is_running: Any) -> None:
        wait_until(lambda: outputs(server) > 500)
        os.kill(engines_of(server.process.pid)[0].pid, number)

    assert streams(server, disturb) == undisturbed
    assert "is started again" in server.errors
    wait_until(lambda: len(engines_of(server.process.pid)) == server.num_engines)
    wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
    assert streams(server, lambda running: None) == undisturbed
