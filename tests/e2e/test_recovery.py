"""Engines are ended while streams run: every stream goes on where it was, and is the same as in a run
that nobody disturbed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engines_of,
    free_port,
    running_server,
    stop_next_engine,
    wait_until,
)

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 20}},
    "required": ["a"],
}
LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "seed": 5, "stream": True}
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
            "max_tokens": 300,
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
                "max_new_tokens": 150,
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
        disturb()
        found = {key: future.result(PATIENCE_S) for key, future in running.items()}
    for name in STREAMS:
        assert found[name, 0] == found[name, 1]
    return {name: found[name, 0] for name in STREAMS}


def states(server: ServerProcess) -> list[dict[str, Any]]:
    return list(get(server, "/server_info").json()["internal_states"])


def get(server: ServerProcess, path: str, **headers: str) -> httpx.Response:
    return httpx.get(server.url + path, timeout=PATIENCE_S, headers=headers)


def post(server: ServerProcess, path: str, headers: Any = None, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=headers, timeout=PATIENCE_S)


def num_engines(server: ServerProcess) -> int:
    return len(get(server, "/v1/loads").json()["loads"])


def all_ready(server: ServerProcess, count: int) -> None:
    wait_until(lambda: get(server, "/ready").status_code == 200 and num_engines(server) == count)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.full), 2])
def server(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with running_server(
        tmp_path_factory.mktemp("server"),
        *("--model-path", str(tiny_model), "--dtype", "float32", "--dp-size", str(request.param)),
        *("--max-engine-restarts", "100", "--num-threads", "1"),
    ) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> dict[str, Any]:
    return streams(server, lambda: None)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.full)]
)
def test_streams_go_on_when_their_engine_ends(
    server: ServerProcess, undisturbed: dict[str, Any], number: int
) -> None:
    count = num_engines(server)

    def disturb() -> None:
        wait_until(lambda: sum(each["num_running_tokens"] for each in states(server)) > 500)
        os.kill(engines_of(server.process.pid)[0].pid, number)

    assert streams(server, disturb) == undisturbed
    assert "is started again" in server.errors
    all_ready(server, count)
    assert streams(server, lambda: None) == undisturbed


HOOKS = """
import os, signal, sys, time

class Fault(BaseException):  # no Exception, which the engine may take for the fault of a request
    pass

def fail(*_):
    raise Fault("a fault in the middle of a step")

if "setpoint.launch.child" in sys.orig_argv:
    signal.signal(signal.SIGRTMIN, lambda *_: time.sleep(3600))
    signal.signal(signal.SIGRTMIN + 1, fail)
"""
"""A sitecustomize module: signals at which an engine's loop hangs, or fails with an exception."""


HANGS = signal.SIGRTMIN, "has not finished a step for 5 s (--watchdog-timeout)"
FAILS = signal.SIGRTMIN + 1, "a fault in the middle of a step"


@pytest.mark.parametrize(
    ("count", "faults"),
    [
        pytest.param(1, [HANGS], id="1-hangs"),
        *(
            pytest.param(
                count, [HANGS, FAILS], id=f"{count}-hangs and fails", marks=pytest.mark.full
            )
            for count in (1, 2)
        ),
    ],
)
def test_streams_go_on_when_their_engine_hangs_or_fails(
    tiny_model: Path, tmp_path: Path, count: int, faults: list[tuple[int, str]]
) -> None:
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "sitecustomize.py").write_text(HOOKS)
    with running_server(
        tmp_path,
        *("--model-path", str(tiny_model), "--dtype", "float32", "--dp-size", str(count)),
        *("--max-engine-restarts", "100", "--num-threads", "1", "--watchdog-timeout", "5"),
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path / "hooks"), *sys.path[1:]])},
    ) as server:
        undisturbed = streams(server, lambda: None)
        for number, said in faults:

            def disturb(number: int = number) -> None:
                wait_until(lambda: sum(each["num_running_tokens"] for each in states(server)) > 500)
                os.kill(engines_of(server.process.pid)[0].pid, number)

            assert streams(server, disturb) == undisturbed
            assert said in server.errors
            all_ready(server, count)


LACKS = """
import signal, sys

def lack(*_):
    import torch
    from setpoint.engine.runner.model_runner import ModelRunner

    run = ModelRunner._run

    def runs(*args, **named):
        ModelRunner._run = run
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 is full")

    ModelRunner._run = runs

if "setpoint.launch.child" in sys.orig_argv:
    signal.signal(signal.SIGRTMIN, lack)
"""
"""A sitecustomize module: a signal after which the next step runs out of memory."""


def test_streams_go_on_when_a_step_runs_out_of_memory(tiny_model: Path, tmp_path: Path) -> None:
    """The first time in the same engine, with smaller chunks; the second time in the next one."""
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "sitecustomize.py").write_text(LACKS)
    with running_server(
        tmp_path,
        *("--model-path", str(tiny_model), "--dtype", "float32", "--chunked-prefill-size", "64"),
        *("--max-engine-restarts", "100", "--num-threads", "1"),
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path / "hooks"), *sys.path[1:]])},
    ) as server:
        undisturbed = streams(server, lambda: None)
        (engine,) = engines_of(server.process.pid)

        def disturb() -> None:
            wait_until(lambda: sum(each["num_running_tokens"] for each in states(server)) > 500)
            os.kill(engines_of(server.process.pid)[0].pid, signal.SIGRTMIN)

        assert streams(server, disturb) == undisturbed
        assert engines_of(server.process.pid) == [engine]
        (told,) = get(server, "/server_info").json()["internal_states"][0]["fallbacks"]
        assert told.startswith("a step computes at most 32 prompt tokens (")
        assert "out of memory: CUDA out of memory" in told
        assert "Tried to allocate 64.00 MiB" in told
        assert streams(server, disturb) == undisturbed
        assert engines_of(server.process.pid) != [engine]
        assert "What would fit: a --mem-fraction-static that is" in server.errors


def test_streams_go_on_when_their_engine_was_stopped_for_a_while(
    server: ServerProcess, undisturbed: dict[str, Any]
) -> None:
    """It lives: nothing is moved, and nothing is started again."""
    engines = engines_of(server.process.pid)

    def disturb() -> None:
        wait_until(lambda: sum(each["num_running_tokens"] for each in states(server)) > 500)
        engines[0].suspend()
        wait_until(lambda: "has been stopped by a signal: its requests wait" in server.errors)
        engines[0].resume()

    assert streams(server, disturb) == undisturbed
    assert [each.pid for each in engines_of(server.process.pid)] == [each.pid for each in engines]


HIDDEN_STATES: dict[str, Any] = {
    "text": "abcdefgh" * 8,
    "return_hidden_states": True,
    "sampling_params": {"max_new_tokens": 150, "ignore_eos": True, "temperature": 0},
}
EMBEDDINGS: dict[str, Any] = {"input": ["abcdefgh" * 25] * 64, "model": "tiny"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("option", "path", "body"),
    [
        ("--enable-return-hidden-states", "/generate", HIDDEN_STATES),
        ("--is-embedding", "/v1/embeddings", EMBEDDINGS),
    ],
    ids=["hidden states", "embeddings"],
)
def test_hidden_states_and_embeddings_survive_their_engine(
    tiny_model: Path, tmp_path: Path, option: str, path: str, body: dict[str, Any]
) -> None:
    def answers(server: ServerProcess, disturb: Any) -> Any:
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(post, server, path, **body) for _ in range(8)]
            disturb()
            found = [each.result(PATIENCE_S) for each in asked]
        assert [each.status_code for each in found] == [200] * 8, found[0].text
        first, *others = map(without_measured, (each.json() for each in found))
        assert all(each == first for each in others)
        return first

    def without_measured(answer: Any) -> Any:
        meta = answer.get("meta_info", {})
        for name in [name for name in meta if "time" in name or "latency" in name or name == "id"]:
            del meta[name]
        meta.pop("cached_tokens", None)
        meta.pop("cached_tokens_details", None)
        meta.pop("dp_rank", None)
        return answer.get("data", answer)

    with running_server(
        tmp_path,
        *("--model-path", str(tiny_model), "--dtype", "float32", "--dp-size", "2"),
        *("--num-threads", "1", "--disable-radix-cache", option),
    ) as server:
        engines = engines_of(server.process.pid)
        undisturbed = answers(server, lambda: None)

        def disturb() -> None:
            wait_until(lambda: sum(each["num_running"] for each in states(server)) > 0)
            engines[0].kill()

        assert answers(server, disturb) == undisturbed
        # The answers may be there before the next engine is started.
        wait_until(lambda: "is started again" in server.errors)


def test_control_calls_reach_every_engine(server: ServerProcess) -> None:
    count = num_engines(server)
    loads = get(server, "/v1/loads").json()
    assert [load["dp_rank"] for load in loads["loads"]] == list(range(count))
    assert get(server, f"/v1/loads?dp_rank={count}").status_code == 400
    assert [load["dp_rank"] for load in get(server, "/get_load").json()] == list(range(count))
    assert post(server, "/pause_generation", mode="in_place").status_code == 200
    assert all(each["paused"] for each in states(server))
    assert post(server, "/continue_generation").status_code == 200
    assert not any(each["paused"] for each in states(server))
    assert httpx.post(f"{server.url}/flush_cache?timeout=30", timeout=60).status_code == 200
    assert all(each["pool"]["free"] == each["pool"]["total"] for each in states(server))


def test_a_client_may_choose_the_engine(server: ServerProcess) -> None:
    count = num_engines(server)
    httpx.post(f"{server.url}/flush_cache?timeout=30", timeout=60)
    body = {"text": "abcdefgh", "sampling_params": {"max_new_tokens": 2}}
    for rank in range(count):
        for ask in (
            {"routed_dp_rank": rank},
            {"headers": {"X-Data-Parallel-Rank": str(rank)}, "routed_dp_rank": (rank + 1) % count},
        ):
            assert post(server, "/generate", **body, **ask).status_code == 200
        taken = [each["pool"]["evictable"] > 0 for each in states(server)]
        assert taken == [other <= rank for other in range(count)]
    for wrong in ({"routed_dp_rank": count}, {"headers": {"X-Data-Parallel-Rank": "-1"}}):
        refused = post(server, "/generate", **body, **wrong)
        assert refused.status_code == 400
        assert f"has the ranks 0 to {count - 1}" in refused.text


@pytest.mark.full
def test_without_restarts_left_the_server_ends_with_its_last_engine(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running_server(
        tmp_path,
        *("--model-path", str(tiny_model), "--dp-size", "2", "--max-engine-restarts", "0"),
    ) as server:
        engines = engines_of(server.process.pid)
        os.kill(engines[0].pid, signal.SIGKILL)
        wait_until(lambda: num_engines(server) == 1)
        server.generate(text="a", sampling_params={"max_new_tokens": 2})
        os.kill(engines[1].pid, signal.SIGKILL)
        assert server.wait_end() == 1
        assert "--max-engine-restarts is 0 an hour" in server.messages[-1]


@pytest.mark.full
def test_requests_that_wait_for_an_engine_that_never_comes_are_told_so(
    tiny_model: Path, tmp_path: Path
) -> None:
    with (
        running_server(
            tmp_path, *("--model-path", str(tiny_model), "--max-engine-restarts", "1")
        ) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        (first,) = engines_of(server.process.pid)
        os.kill(first.pid, signal.SIGKILL)
        second = stop_next_engine(server.process.pid, {first.pid})
        waiting = pool.submit(post, server, "/generate", text="a")
        wait_until(lambda: b"restarting" in get(server, "/ready").content)
        wait_until(lambda: get(server, "/fault_tolerance/status").json()["num_waiting"] == 1)
        assert not waiting.done()
        os.kill(second, signal.SIGKILL)
        answer = waiting.result(PATIENCE_S)
        reason = "It is not started again: --max-engine-restarts is 1 an hour."
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert reason in answer.json()["message"]
        assert server.wait_end() == 1
        assert reason in server.messages[-1]
        assert "Traceback" not in server.errors


def rank_states(server: ServerProcess) -> list[str]:
    return [each["state"] for each in get(server, "/server_info").json()["ranks"]]


def is_told(server: ServerProcess, rank: int) -> None:
    """The server serves without this rank, and every surface says so."""
    states = rank_states(server)
    assert states == ["ended" if each == rank else "ready" for each in range(2)]
    assert f"Engine {rank} is not started again, and the other engines go on serving: " in (
        server.errors
    )
    for path, status in (("/health", 200), ("/ready", 503)):
        answer = get(server, path)
        assert (answer.status_code, answer.text) == (status, f"engine {rank}: ended\n")
    page = get(server, "/metrics").text
    for each in (0, 1):
        (sample,) = (
            line
            for line in page.splitlines()
            if line.startswith("setpoint:rank_up{") and f'dp_rank="{each}"' in line
        )
        assert float(sample.split()[-1]) == (each != rank)
    server.generate(text="a", sampling_params={"max_new_tokens": 2})


@pytest.mark.full
def test_a_rank_that_never_starts_is_told_and_the_others_serve(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running_server(
        tmp_path,
        *("--model-path", str(tiny_model), "--dp-size", "2", "--enable-metrics"),
        ready=False,
    ) as server:
        late = stop_next_engine(server.process.pid, set())
        server.wait_ready()
        rank = rank_states(server).index("starting")
        assert f"engine {rank}: starting" in get(server, "/ready").text
        os.kill(late, signal.SIGKILL)
        wait_until(lambda: "is not started again, and the other engines" in server.errors)
        is_told(server, rank)


@pytest.mark.full
def test_a_rank_that_does_not_come_back_is_told_and_the_others_serve(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running_server(
        tmp_path,
        *("--model-path", str(tiny_model), "--dp-size", "2", "--enable-metrics"),
        *("--max-engine-restarts", "1"),
    ) as server:
        all_ready(server, 2)
        engines = {each.pid for each in engines_of(server.process.pid)}
        os.kill(min(engines), signal.SIGKILL)
        late = stop_next_engine(server.process.pid, engines)
        rank = rank_states(server).index("restarting")
        os.kill(late, signal.SIGKILL)
        wait_until(lambda: "is not started again, and the other engines" in server.errors)
        is_told(server, rank)


@pytest.mark.full
def test_of_two_servers_on_one_port_one_says_so_in_one_line(
    tiny_model: Path, tmp_path: Path
) -> None:
    """They start together, so that the port is still free for both."""
    port = free_port()
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                running_server(
                    tmp_path / str(number),
                    *("--model-path", str(tiny_model)),
                    port=port,
                    ready=False,
                )
            )
            for number in range(2)
        ]
        wait_until(lambda: any(each.process.poll() is not None for each in servers), timeout_s=120)
        servers.sort(key=lambda each: each.process.poll() is None)
        refused, serving = servers
        assert refused.process.returncode == 2
        said = [line for line in refused.messages if "Cannot listen" in line]
        assert said == refused.messages[-1:]
        assert f"Cannot listen on 127.0.0.1:{port}: Address already in use" in said[0]
        assert "Traceback" not in refused.errors
        serving.wait_ready()


def test_more_engines_than_cores_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    with running_server(
        tmp_path, "--model-path", str(tiny_model), "--dp-size", "64", ready=False
    ) as server:
        assert server.wait_end() == 2
        assert "--dp-size 64 is more than the" in server.messages[-1]
