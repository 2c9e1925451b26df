"""One model on several nodes (--nnodes), which are processes of this machine here: the answers of one
process, and an end with a reason for whatever does not come about."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_recovery import states, streams

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 4 heads of K and V, so that up to 4 ranks can divide it."""
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("model"),
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        hidden_size=128,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    write_byte_tokenizer(folder)
    return folder


class Node:
    """A node that runs ranks only; one that ends is started again if ``rejoins``, as a service
    manager would do."""

    def __init__(self, folder: Path, arguments: list[str], *, rejoins: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "node.txt"
        self._command = [sys.executable, "-m", "setpoint.cli", "serve", *arguments]
        self._is_wanted = rejoins
        self.codes: list[int] = []
        """Exit codes of the processes that have ended."""
        self._start()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        with self._path.open("ab") as file:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def _keep(self) -> None:
        while True:
            self.codes.append(self.process.wait())
            if not self._is_wanted:
                return
            self._start()

    @property
    def log(self) -> str:
        return self._path.read_text(errors="replace")

    def ranks(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [each for each in children if "setpoint.launch.child.rank" in each.cmdline()]

    def wait_end(self) -> int:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), self.log
        return self.codes[-1]

    def end(self) -> None:
        self._is_wanted = False
        self.process.kill()
        self._thread.join(PATIENCE_S)


def options(folder: Path, size: int, nnodes: int, port: int, *more: str) -> list[str]:
    return [
        *("--model-path", str(folder), "--num-threads", "1", "--max-total-tokens", "40960"),
        *("--tp-size", str(size), "--nnodes", str(nnodes)),
        *("--dist-init-addr", f"127.0.0.1:{port}", "--dist-timeout", "60", *more),
    ]


@contextmanager
def nodes(
    folder: Path,
    where: Path,
    size: int,
    nnodes: int,
    *more: str,
    rejoin: bool = False,
    restarts: int = 100,
) -> Iterator[tuple[ServerProcess, list[Node]]]:
    """Node 0 and the others."""
    arguments = options(folder, size, nnodes, free_port(), *more)
    with ExitStack() as stack:
        others = []
        for number in range(1, nnodes):
            own = [*arguments, "--node-rank", str(number)]
            others.append(Node(where / str(number), own, rejoins=rejoin))
            stack.callback(others[-1].end)
        server = running_server(where, *arguments, "--max-engine-restarts", str(restarts))
        yield stack.enter_context(server), others


def answers_of_one(folder: Path, where: Path, *asked: str) -> dict[str, Any]:
    one = ["--model-path", str(folder), "--max-total-tokens", "40960", *asked]
    with running_server(where, *one) as server:
        return streams(server, lambda: None)


W8A8 = ("--quantization", "w8a8_int8")


@pytest.mark.parametrize(
    ("size", "nnodes", "asked"),
    [
        (2, 2, ()),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((3, 3, ()), (4, 2, ()), (2, 2, W8A8), (3, 3, W8A8), (4, 2, W8A8))
        ),
    ],
)
def test_several_nodes_answer_as_one_process(
    folder: Path, tmp_path: Path, size: int, nnodes: int, asked: tuple[str, ...]
) -> None:
    alone = answers_of_one(folder, tmp_path / "alone", *asked)
    with nodes(folder, tmp_path, size, nnodes, "--dist-secret", "known", *asked) as (
        server,
        others,
    ):
        assert streams(server, lambda: None) == alone
        assert [len(node.ranks()) for node in others] == [size // nnodes] * (nnodes - 1)
        assert f"Rank {size - 1} (node {nnodes - 1}) has joined" in server.errors
        assert "exchanges through torch.distributed cannot be captured" in server.errors
        server.end()
        assert [node.wait_end() for node in others] == [0] * (nnodes - 1)
    assert "Node 0 has ended, and so does this node." in others[0].log


@pytest.mark.full
def test_streams_go_on_when_a_node_has_ended_and_joins_again(folder: Path, tmp_path: Path) -> None:
    with nodes(folder, tmp_path, 2, 2, rejoin=True) as (server, (node,)):
        undisturbed = streams(server, lambda: None)
        victims: tuple[Callable[[], int], ...] = (
            lambda: node.process.pid,
            lambda: node.ranks()[0].pid,
            lambda: engines_of(server.process.pid)[0].pid,
        )
        for number, victim in enumerate(victims, 1):

            def disturb(victim: Callable[[], int] = victim) -> None:
                wait_until(lambda: sum(each["num_running_tokens"] for each in states(server)) > 300)
                os.kill(victim(), signal.SIGKILL)

            assert streams(server, disturb) == undisturbed
            assert len(node.codes) == number
        assert "The link to rank 1 (node 1, 127.0.0.1) is lost" in server.errors


@pytest.mark.full
def test_a_node_that_does_not_come_back_ends_the_server(folder: Path, tmp_path: Path) -> None:
    with nodes(folder, tmp_path, 2, 2, "--dist-timeout", "8", restarts=2) as (server, (node,)):
        node.process.kill()
        assert server.wait_end() == 1
        assert server.errors.count("ERROR: Rank 1 (node 1) did not join") == 2
        assert "Rank 1 (node 1) did not join at 127.0.0.1:" in server.errors


def test_a_node_ends_when_node_0_is_killed(folder: Path, tmp_path: Path) -> None:
    with nodes(folder, tmp_path, 2, 2) as (server, (node,)):
        server.process.kill()
        node.wait_end()


@pytest.mark.full
def test_nodes_that_disagree_say_about_what(folder: Path, tmp_path: Path) -> None:
    reason = "--dtype is float32 there and bfloat16 on node 0"
    arguments = options(folder, 2, 2, free_port(), "--dist-timeout", "8")
    node = Node(tmp_path / "1", [*arguments, "--node-rank", "1", "--dtype", "float32"])
    try:
        with running_server(tmp_path, *arguments, ready=False) as server:
            assert node.wait_end() == 1
            assert reason in node.log
            assert server.wait_end() == 1
            assert f"Refused a rank from 127.0.0.1: {reason}" in server.errors
            assert "Rank 1 (node 1) did not join at 127.0.0.1:" in server.errors
            assert "within 8 s (--dist-timeout)" in server.errors
    finally:
        node.end()


@pytest.mark.full
def test_a_node_that_is_started_twice(folder: Path, tmp_path: Path) -> None:
    arguments = options(folder, 2, 2, free_port())
    first = Node(tmp_path / "1", [*arguments, "--node-rank", "1"])
    try:
        with running_server(tmp_path, *arguments):
            second = Node(tmp_path / "2", [*arguments, "--node-rank", "1"])
            assert second.wait_end() == 1
            assert (
                "rank 1 (node 1) has joined already, from 127.0.0.1: was it started" in second.log
            )
            assert not first.codes
    finally:
        first.end()


@pytest.mark.full
def test_nobody_is_there(folder: Path, tmp_path: Path) -> None:
    port = free_port()
    node = Node(tmp_path, [*options(folder, 2, 2, port), "--node-rank", "1", "--dist-timeout", "2"])
    assert node.wait_end() == 1
    assert f"Waiting for node 0 at 127.0.0.1:{port} (Connection refused)" in node.log
    assert f"cannot be reached at --dist-init-addr 127.0.0.1:{port} within 2 s" in node.log


@pytest.mark.full
def test_an_address_in_use_ends_the_start(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running_server(tmp_path, *options(folder, 2, 2, port), ready=False) as server:
            assert server.wait_end() == 1
            assert (
                f"Cannot listen on --dist-init-addr 127.0.0.1:{port}: another program uses it"
                in server.errors
            )


@pytest.mark.full
def test_a_node_ends_at_a_signal(folder: Path, tmp_path: Path) -> None:
    node = Node(tmp_path, [*options(folder, 2, 2, free_port()), "--node-rank", "1"])
    wait_until(lambda: "Waiting for node 0" in node.log or node.codes)
    ranks = node.ranks()
    node.process.terminate()
    assert node.wait_end() == 0
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.full
def test_torchrun_says_which_node_this_is(folder: Path, tmp_path: Path) -> None:
    port, http = free_port(), free_port()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank"),
    ]
    serve = [
        *("-m", "setpoint.cli", "serve", "--model-path", str(folder), "--tp-size", "2"),
        *("--num-threads", "1", "--max-total-tokens", "4096", "--port", str(http)),
    ]
    with ExitStack() as stack:
        logs, started = [], []
        for number in "01":
            path = tmp_path / number
            logs.append(path)
            with path.open("wb") as file:
                process = subprocess.Popen(
                    [*command, number, *serve], stdout=file, stderr=file, stdin=subprocess.DEVNULL
                )
            started.append(process)
            stack.callback(process.kill)
        wait_until(lambda: "ready to roll" in logs[0].read_text(), timeout_s=2 * PATIENCE_S)
        assert "Rank 1 (node 1) has joined" in logs[0].read_text()
        for process in started:
            process.terminate()
        for process in started:
            process.wait(2 * PATIENCE_S)
