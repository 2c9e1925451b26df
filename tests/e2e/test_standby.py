"""``--engine-standby``: an engine that dies is followed by one that is loaded already."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from setpoint_testing.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE
from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engines_of,
    running_server,
    stop_next_engine,
    wait_until,
)
from setpoint_testing.tiny_models import write_tiny_llama

BODY: dict[str, Any] = {
    "text": "abcdef",
    "sampling_params": {
        "max_new_tokens": 400,
        "ignore_eos": True,
        "temperature": 1,
        "sampling_seed": 7,
    },
}
TAKEN = "The standby takes the place of engine 0"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(
        tmp_path_factory.mktemp("server"),
        *("--model-path", str(tiny_model), "--dtype", "float32", "--num-threads", "1"),
        *("--engine-standby", "--enable-metrics", "--max-engine-restarts", "100"),
    ) as server:
        yield server


def post(server: ServerProcess, path: str, **body: Any) -> None:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)
    assert answer.is_success, answer.text


def info(server: ServerProcess) -> Any:
    return httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()


def has_standby(server: ServerProcess) -> bool:
    ready = httpx.get(f"{server.url}/ready", timeout=PATIENCE_S).status_code == 200
    return ready and info(server)["standby"] == "ready"


def pair(server: ServerProcess) -> tuple[psutil.Process, psutil.Process]:
    """The engine that serves, and the standby, which was started after it."""
    wait_until(lambda: has_standby(server))
    first, second = sorted(engines_of(server.process.pid), key=lambda each: each.create_time())
    return first, second


def answers(server: ServerProcess, disturb: Any) -> list[str]:
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(server.generate, **BODY) for _ in range(8)]
        disturb()
        return [each.result(PATIENCE_S)["text"] for each in asked]


def is_computing(server: ServerProcess) -> bool:
    return server.state()["num_running_tokens"] > 200


def test_it_takes_the_place_of_an_engine_that_is_killed(server: ServerProcess) -> None:
    engine, standby = pair(server)
    undisturbed = answers(server, lambda: None)
    restarts = server.errors.count("is started again")

    def disturb() -> None:
        wait_until(lambda: is_computing(server))
        engine.kill()

    assert answers(server, disturb) == undisturbed
    assert TAKEN in server.errors
    assert server.errors.count("is started again") == restarts
    serving, following = pair(server)
    assert (serving.pid, following.pid != engine.pid) == (standby.pid, True)
    page = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    (sample,) = (line for line in page.splitlines() if line.startswith("setpoint:standby_ready"))
    assert float(sample.split()[-1]) == 1
    sizes = {each["memory_usage"]["token_capacity"] for each in info(server)["internal_states"]}
    assert sizes == {info(server)["max_total_num_tokens"]}


@pytest.mark.full
def test_a_standby_that_dies_is_replaced(server: ServerProcess) -> None:
    engine, standby = pair(server)

    def disturb() -> None:
        wait_until(lambda: is_computing(server))
        standby.kill()

    answers(server, disturb)
    wait_until(lambda: "The standby engine has ended: " in server.errors)
    serving, following = pair(server)
    assert serving.pid == engine.pid
    assert following.pid != standby.pid


@pytest.mark.full
def test_both_may_die_at_once(server: ServerProcess) -> None:
    engine, standby = pair(server)
    undisturbed = answers(server, lambda: None)

    def disturb() -> None:
        wait_until(lambda: is_computing(server))
        standby.kill()
        engine.kill()

    assert answers(server, disturb) == undisturbed
    serving, following = pair(server)
    assert not {serving.pid, following.pid} & {engine.pid, standby.pid}


@pytest.mark.full
def test_it_has_the_options_of_now(server: ServerProcess) -> None:
    engine, standby = pair(server)
    changed = httpx.post(
        f"{server.url}/set_internal_state",
        json={"server_args": {"max_running_requests": 3}},
        timeout=PATIENCE_S,
    )
    assert changed.status_code == 200, changed.text
    wait_until(lambda: "The standby engine is replaced" in server.errors)
    engine, other = pair(server)
    assert other.pid != standby.pid
    taken = server.errors.count(TAKEN)
    engine.kill()
    wait_until(lambda: server.errors.count(TAKEN) > taken)
    pair(server)
    assert server.state()["settings"]["max_running_requests"] == 3


@pytest.mark.full
def test_the_end_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    with running_server(tmp_path, "--model-path", str(tiny_model), "--engine-standby") as server:
        both = pair(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0
        wait_until(lambda: not any(each.is_running() for each in both))
        assert " died: " not in server.errors


@pytest.mark.full
def test_it_has_the_weights_of_now(tiny_model: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(
        tmp_path / "other",
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        max_position_embeddings=4096,
        seed=1,
    )
    with running_server(
        tmp_path,
        *("--model-path", str(tiny_model), "--dtype", "float32", "--num-threads", "1"),
        *("--engine-standby", "--update-weights-folder", str(tmp_path)),
        *("--record", str(tmp_path / "run.rec")),
    ) as server:
        _, standby = pair(server)
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 40, "temperature": 0}}
        old = server.generate(**body)["text"]
        changed = httpx.post(
            f"{server.url}/update_weights_from_disk",
            json={"model_path": str(other)},
            timeout=PATIENCE_S,
        )
        assert changed.json()["success"], changed.text
        new = server.generate(**body)["text"]
        assert new != old
        wait_until(lambda: "The standby engine is replaced" in server.errors)
        engine, following = pair(server)
        assert following.pid != standby.pid
        engine.kill()
        wait_until(lambda: TAKEN in server.errors)
        assert server.generate(**body)["text"] == new
        pair(server)
        # Two standbys have never served, and the second engine has the number after the first.
        assert sorted(each.name for each in tmp_path.glob("run.rec*")) == ["run.rec", "run.rec-2"]


@pytest.mark.full
def test_a_pause_holds_when_it_takes_over(server: ServerProcess) -> None:
    undisturbed = answers(server, lambda: None)
    engine, _ = pair(server)

    def disturb() -> None:
        wait_until(lambda: is_computing(server))
        post(server, "/pause_generation", mode="in_place")
        taken = server.errors.count(TAKEN)
        engine.kill()
        wait_until(lambda: server.errors.count(TAKEN) > taken)
        wait_until(lambda: has_standby(server))
        state = server.state()
        assert (state["paused"], state["num_running"]) == ("in_place", 0)
        assert state["num_paused_reqs"] == 8
        post(server, "/continue_generation")

    assert answers(server, disturb) == undisturbed


def test_it_loads_with_a_low_priority_and_serves_with_the_usual_one(server: ServerProcess) -> None:
    _, standby = pair(server)
    for thread in Path(f"/proc/{standby.pid}/task").iterdir():
        with suppress(FileNotFoundError):
            assert os.getpriority(os.PRIO_PROCESS, int(thread.name)) == os.getpriority(
                os.PRIO_PROCESS, server.process.pid
            )


@pytest.mark.full
def test_a_standby_that_cannot_start_is_given_up_and_told(tiny_model: Path, tmp_path: Path) -> None:
    with running_server(
        tmp_path,
        *("--model-path", str(tiny_model), "--engine-standby", "--max-engine-restarts", "1"),
        "--enable-metrics",
    ) as server:
        assert " GB for its weights; the KV cache is smaller" in server.errors
        engine, standby = pair(server)
        standby.kill()
        late = stop_next_engine(server.process.pid, {engine.pid, standby.pid})
        os.kill(late, signal.SIGKILL)
        wait_until(lambda: info(server)["standby"] == "ended")
        reason = "No other standby is started, because --max-engine-restarts is 1 an hour."
        assert reason in info(server)["standby_death"]
        assert reason in server.errors
        page = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
        for name, value in (("standby_deaths_total", 2), ("engine_restarts_left", 1)):
            (sample,) = (each for each in page.splitlines() if each.startswith(f"setpoint:{name}"))
            assert float(sample.split()[-1]) == value
        assert [each.pid for each in engines_of(server.process.pid)] == [engine.pid]
        post(server, "/fault_tolerance/apply", instruction="retry")
        pair(server)


@pytest.mark.full
def test_it_takes_over_although_no_restart_is_left(tiny_model: Path, tmp_path: Path) -> None:
    with running_server(
        tmp_path,
        *("--model-path", str(tiny_model), "--engine-standby", "--max-engine-restarts", "0"),
    ) as server:
        engine, standby = pair(server)
        engine.kill()
        wait_until(lambda: TAKEN in server.errors)
        server.generate(text="a", sampling_params={"max_new_tokens": 2})
        wait_until(lambda: info(server)["standby"] == "ended")
        assert "No standby is started: --max-engine-restarts is 0 an hour." in server.errors
        standby.kill()
        assert server.wait_end() == 1
        assert "--max-engine-restarts is 0 an hour" in server.messages[-1]


def test_it_is_refused_beside_several_engines(tiny_model: Path, tmp_path: Path) -> None:
    with running_server(
        tmp_path,
        *("--model-path", str(tiny_model), "--dp-size", "2", "--engine-standby"),
        ready=False,
    ) as server:
        assert server.wait_end() == 2
        assert "--engine-standby is for a server with one engine" in server.messages[-1]
