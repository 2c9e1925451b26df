"""Controls of a real server: memory that really goes back to the system, other weights, a pause,
and an engine that is killed in the middle of one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint_testing.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engine_of,
    engines_of,
    running_server,
    wait_until,
)
from setpoint_testing.tiny_models import write_tiny_llama

GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
PROMPT = "The quick brown fox"
MIB = 1 << 20


def checkpoint(folder: Path, seed: int) -> Path:
    """Some 60 MB of weights in float32."""
    write_tiny_llama(
        folder,
        seed=seed,
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        max_position_embeddings=2048,
    )
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        checkpoint(folder / str(seed), seed)
    return folder


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(
        tmp_path,
        *("--model-path", str(folder / "0"), "--update-weights-folder", str(folder)),
        *("--dtype", "float32", "--max-total-tokens", "4096"),
    ) as server:
        yield server


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def text(server: ServerProcess) -> str:
    response = post(server, "/generate", text=PROMPT, sampling_params=GREEDY)
    assert response.status_code == 200, response.text
    return str(response.json()["text"])


@pytest.mark.full
def test_memory_and_weights(server: ServerProcess, folder: Path) -> None:
    engine = engine_of(server.process.pid)
    old = text(server)
    before = engine.memory_info().rss
    usage = internal_state(server)["memory_usage"]
    assert post(server, "/release_memory_occupation").status_code == 200
    weights = usage["weight"] * 1024
    assert weights > 50
    assert before - engine.memory_info().rss > 0.9 * weights * MIB
    now = internal_state(server)["memory_usage"]
    assert (now["weight"], now["kvcache"], now["graph"]) == (0, 0, 0)
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(text(server)))
    waiting.start()
    wait_until(lambda: internal_state(server)["num_paused_reqs"] == 1)
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    assert post(server, "/release_memory_occupation").status_code == 400
    assert post(server, "/resume_memory_occupation", tags=["weights"]).status_code == 200
    assert not answers
    assert post(server, "/resume_memory_occupation").status_code == 200
    waiting.join()
    assert answers == [old]

    assert post(server, "/update_weights_from_disk", model_path="/etc").status_code == 403
    body = {"model_path": str(folder / "1"), "weight_version": "one"}
    assert post(server, "/update_weights_from_disk", **body).json()["success"]
    new = text(server)
    assert new != old
    info = httpx.get(f"{server.url}/model_info", timeout=PATIENCE_S).json()
    assert (info["weight_version"], info["model_path"]) == ("one", str(folder / "1"))
    back = {"model_path": str(folder / "0")}
    assert post(server, "/update_weights_from_disk", **back).json()["success"]
    assert text(server) == old


def internal_state(server: ServerProcess) -> Any:
    (state,) = httpx.get(f"{server.url}/server_info", timeout=60).json()["internal_states"]
    return state


@pytest.mark.full
def test_an_engine_that_is_killed_during_a_pause(server: ServerProcess) -> None:
    """The engine in its place is paused as well; the requests wait, and are answered after the
    pause."""
    assert post(server, "/pause_generation", mode="retract").status_code == 200
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(post(server, "/generate", text=PROMPT).status_code)

    asking = [threading.Thread(target=ask) for _ in range(20)]
    for thread in asking:
        thread.start()
    wait_until(lambda: internal_state(server)["num_paused_reqs"] == 20)
    engine = engine_of(server.process.pid)
    os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: engines_of(server.process.pid) not in ([], [engine]))
    wait_until(lambda: httpx.get(f"{server.url}/ready", timeout=PATIENCE_S).status_code == 200)
    assert internal_state(server)["num_paused_reqs"] == 20
    assert post(server, "/continue_generation").status_code == 200
    for thread in asking:
        thread.join()
    assert statuses == [200] * 20


@pytest.mark.full
def test_no_name_that_a_client_gives_ends_the_server(server: ServerProcess, folder: Path) -> None:
    """Red before: the thousand levels ended the engine with a RecursionError, and 256 characters
    were a 500."""
    old = text(server)
    for name in ("/".join("a" * 1000), "a" * 256, "\0"):
        for path, body in (
            ("/start_profile", {"output_dir": name, "num_steps": 1}),
            ("/update_weights_from_disk", {"model_path": f"{folder}/{name}"}),
        ):
            response = post(server, path, **body)
            assert response.status_code == 400, response.text
    assert text(server) == old
