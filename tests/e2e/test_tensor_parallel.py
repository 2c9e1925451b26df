"""One model on several processes (--tp-size): the answers of one process, whatever is asked for and
whichever process is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from test_recovery import all_ready, num_engines, post, states, stream, streams

from setpoint_testing.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.server_process import (
    PATIENCE_S,
    ServerProcess,
    engines_of,
    free_port,
    running_server,
    wait_until,
)
from setpoint_testing.tiny_models import write_tiny_llama

EMBEDDED = {"input": ["a text", "another one"], "model": "tiny"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of 6 heads and 3 of K and V, which two ranks divide unevenly."""
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        write_tiny_llama(
            folder / str(seed),
            seed=seed,
            vocab_size=VOCAB_SIZE,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            hidden_size=96,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=4096,
        )
        write_byte_tokenizer(folder / str(seed))
    return folder


@contextmanager
def serving(folder: Path, where: Path, *options: str) -> Iterator[ServerProcess]:
    with running_server(
        where,
        *("--model-path", str(folder / "0"), "--update-weights-folder", str(folder)),
        *("--max-engine-restarts", "100", "--num-threads", "1", "--max-total-tokens", "40960"),
        *options,
    ) as server:
        yield server


def ranks_of(server: ServerProcess) -> list[psutil.Process]:
    """The ranks but the first of all engines."""
    return [
        child
        for engine in engines_of(server.process.pid)
        for child in engine.children()
        if "setpoint.launch.child.rank" in child.cmdline()
    ]


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process answers."""
    with serving(folder, tmp_path_factory.mktemp("alone")) as server:
        return streams(server, lambda: None)


@pytest.fixture(scope="module")
def two_ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(folder, tmp_path_factory.mktemp("two"), "--tp-size", "2") as server:
        yield server
        ranks = ranks_of(server)
        assert len(ranks) == 1
    assert not any(rank.is_running() for rank in ranks)


def test_two_ranks_answer_as_one(two_ranks: ServerProcess, alone: dict[str, Any]) -> None:
    assert streams(two_ranks, lambda: None) == alone
    assert len(ranks_of(two_ranks)) == 1
    assert "TP1] Load weight end" in two_ranks.errors
    assert two_ranks.errors.count("max_total_num_tokens=40960") == 1


def test_streams_go_on_when_a_rank_is_killed(
    two_ranks: ServerProcess, alone: dict[str, Any]
) -> None:
    end_a_rank(two_ranks, signal.SIGKILL, alone)


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (3, ("--chunked-prefill-size", "4")),
        (2, ("--disable-cuda-graph", "--disable-radix-cache")),
    ],
)
def test_several_ranks_answer_as_one(
    folder: Path, tmp_path: Path, alone: dict[str, Any], size: int, options: tuple[str, ...]
) -> None:
    with serving(folder, tmp_path, "--tp-size", str(size), *options) as server:
        assert streams(server, lambda: None) == alone
        ranks = ranks_of(server)
        assert len(ranks) == size - 1
        assert "TP1] Load weight end" in server.errors
        assert server.errors.count("max_total_num_tokens=40960") == 1
    assert not any(rank.is_running() for rank in ranks)


def end_a_rank(server: ServerProcess, number: signal.Signals, alone: dict[str, Any]) -> None:
    """End a rank by a signal under streams, and wait until all engines are whole again."""
    count = num_engines(server)

    def disturb() -> None:
        wait_until(lambda: sum(each["num_running_tokens"] for each in states(server)) > 500)
        os.kill(ranks_of(server)[0].pid, number)

    assert streams(server, disturb) == alone
    assert f"has ended: {number.name}. The engine ends." in server.errors
    all_ready(server, count)
    assert len(ranks_of(server)) == count


@pytest.mark.full
@pytest.mark.parametrize("options", [("--tp-size", "2"), ("--tp-size", "2", "--dp-size", "2")])
def test_streams_go_on_when_a_rank_ends(
    folder: Path, tmp_path: Path, alone: dict[str, Any], options: tuple[str, ...]
) -> None:
    with serving(folder, tmp_path, *options) as server:
        count = num_engines(server)
        for number in (signal.SIGKILL, signal.SIGSEGV):
            end_a_rank(server, number, alone)
        engine = engines_of(server.process.pid)[0]
        rank = engine.children()[0]
        engine.kill()
        wait_until(lambda: not rank.is_running())
        all_ready(server, count)


@pytest.mark.full
def test_a_rank_that_was_stopped_for_a_while(
    folder: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    """Everything waits for it, and nothing is started again."""
    with serving(folder, tmp_path, "--tp-size", "2") as server:
        (rank,) = ranks_of(server)

        def disturb() -> None:
            wait_until(lambda: sum(each["num_running_tokens"] for each in states(server)) > 500)
            rank.suspend()
            wait_until(lambda: rank.status() == psutil.STATUS_STOPPED)
            rank.resume()

        assert streams(server, disturb) == alone
        assert ranks_of(server) == [rank]


@pytest.mark.full
def test_memory_and_weights_on_all_ranks(
    folder: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    with serving(folder, tmp_path, "--tp-size", "2") as server:
        assert post(server, "/release_memory_occupation").status_code == 200
        assert post(server, "/resume_memory_occupation").status_code == 200
        assert streams(server, lambda: None) == alone
        other = {"model_path": str(folder / "1"), "flush_cache": True}
        assert post(server, "/update_weights_from_disk", **other).json()["success"]
        assert stream(server, "greedy") != alone["greedy"]
        back = {"model_path": str(folder / "0"), "flush_cache": True}
        assert post(server, "/update_weights_from_disk", **back).json()["success"]
        assert streams(server, lambda: None) == alone
        nowhere = {"model_path": str(folder / "nowhere")}
        assert post(server, "/update_weights_from_disk", **nowhere).status_code == 400
        assert stream(server, "greedy") == alone["greedy"]


@pytest.mark.full
def test_embeddings_on_ranks(folder: Path, tmp_path: Path) -> None:
    found = []
    for size in ("1", "2"):
        with serving(folder, tmp_path, "--is-embedding", "--tp-size", size) as server:
            found.append(httpx.post(f"{server.url}/v1/embeddings", json=EMBEDDED).json()["data"])
    assert found[0] == found[1]


def run(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "setpoint.cli", "serve", "--port", str(free_port()), *options],
        capture_output=True,
        text=True,
        env=os.environ | env,
        timeout=PATIENCE_S,
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--tp-size", "4"),
            "--tp-size 4 cannot divide the 6 attention heads of this model, which share 3 heads of"
            " K and V; possible: 1, 2, 3, 6.",
        ),
        (
            ("--tp-size", "2", "--enable-torch-compile"),
            "--enable-torch-compile cannot be combined with --tp-size",
        ),
        (("--tp-size", "0"), "--tp-size must be at least 1, got 0."),
    ],
)
def test_refused(folder: Path, options: tuple[str, ...], message: str) -> None:
    done = run("--model-path", str(folder / "0"), *options)
    assert done.returncode == 2
    assert message in done.stderr


HOOK = """
import os, sys

if "setpoint.launch.child.rank" in sys.orig_argv:
    os._exit(3)
"""


def test_a_rank_that_cannot_start_ends_the_start(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(tmp_path), *sys.path[1:]])
    done = run("--model-path", str(folder / "0"), "--tp-size", "2", PYTHONPATH=path)
    assert done.returncode == 1
    assert "has ended: exit code 3. The engine ends." in done.stderr
