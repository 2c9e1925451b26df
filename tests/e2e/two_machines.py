"""Two machines that serve one model over a bad network. Needs root, for two network namespaces
(``setpoint_testing.network``)."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from setpoint_testing.network import Link, Machine, network
from setpoint_testing.server_process import wait_until

PROMPTS = ([5, 17, 99, 3], list(range(3, 103)), [7] * 31)
PORT, MEETING_PORT = 30000, 5000
START_S = 180.0
REPLY_S = 600.0
OUTAGE_S = 3.0
"""How long the link stays cut after both ends have noticed it."""


@dataclass
class Node:
    """A process on a machine; one that ends by itself is started again, as by a service manager."""

    machine: Machine
    arguments: Sequence[str]
    log: Path
    num_ends: int = 0
    """How many of its processes have ended."""
    is_wanted: bool = True

    def start(self) -> None:
        self._spawn()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _spawn(self) -> None:
        words = [sys.executable, "-m", "setpoint.cli", "serve", *self.arguments]
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                self.machine.command(*words), stdout=file, stderr=file, stdin=subprocess.DEVNULL
            )

    def _keep(self) -> None:
        while True:
            self.process.wait()
            self.num_ends += 1
            if not self.is_wanted:
                return
            time.sleep(1)
            self._spawn()

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        self.is_wanted = False
        self.process.terminate()
        self._thread.join(30)
        self.process.kill()


@dataclass
class Pair:
    first: Node
    second: Node

    def generate(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        return self.first.machine.call(_generate, ids, num_tokens)


def _generate(ids: Sequence[int], num_tokens: int) -> list[int]:
    params = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"http://127.0.0.1:{PORT}/generate",
        json={"input_ids": list(ids), "sampling_params": params},
        timeout=REPLY_S,
    )
    answer.raise_for_status()
    output_ids: list[int] = answer.json()["output_ids"]
    return output_ids


def common(model: Path) -> list[str]:
    return [
        *("--model-path", str(model), "--skip-tokenizer-init", "--port", str(PORT)),
        *("--num-threads", "1", "--max-total-tokens", "8192", "--disable-radix-cache"),
    ]


@contextmanager
def pair(model: Path, logs: Path, link: Link) -> Iterator[Pair]:
    """Two nodes that are ready."""
    with network(link) as machines:
        meeting = ["--dist-init-addr", f"{machines[0].address}:{MEETING_PORT}"]
        ranks = ["--tp-size", "2", "--nnodes", "2", "--dist-secret", "known"]
        arguments = [*common(model), *ranks, *meeting, "--dist-timeout", "120"]
        nodes = [
            Node(machine, [*arguments, "--node-rank", str(number)], logs / f"node-{number}.txt")
            for number, machine in enumerate(machines)
        ]
        try:
            for node in nodes:
                node.log.unlink(missing_ok=True)
                node.start()
            wait_until(lambda: "ready to roll" in nodes[0].said, timeout_s=START_S)
            yield Pair(*nodes)
        finally:
            for node in nodes:
                node.end()


def one_process(model: Path, logs: Path, num_tokens: int) -> list[list[int]]:
    """The answers of one process."""
    with network() as (machine, _):
        node = Node(machine, common(model), logs / "alone.txt")
        node.start()
        try:
            wait_until(lambda: "ready to roll" in node.said, timeout_s=START_S)
            return [machine.call(_generate, ids, num_tokens) for ids in PROMPTS]
        finally:
            node.end()


def over(model: Path, logs: Path, link: Link, num_tokens: int) -> list[list[int]]:
    """The answers over a link."""
    with pair(model, logs, link) as two:
        return [two.generate(ids, num_tokens) for ids in PROMPTS]


def cut(model: Path, logs: Path, link: Link, num_tokens: int) -> tuple[list[int], bool]:
    """Cut the link while an answer is computed, and mend it after both ends have noticed. Returns
    the answer to the second prompt, and whether the server of the first node has lived on."""
    with pair(model, logs, link) as two:
        answers: list[list[int]] = []
        request = threading.Thread(
            target=lambda: answers.append(two.generate(PROMPTS[1], num_tokens)), daemon=True
        )
        before = link.num_packets
        request.start()
        wait_until(lambda: link.num_packets > before + 20)  # it is being computed
        link.is_cut = True
        wait_until(lambda: "is lost: " in two.first.said, timeout_s=START_S, every_s=0.1)
        wait_until(lambda: two.second.num_ends > 0, timeout_s=START_S, every_s=0.1)
        time.sleep(OUTAGE_S)
        link.is_cut = False
        wait_until(lambda: two.first.said.count(" has joined from ") == 2, timeout_s=START_S)
        request.join(REPLY_S)
        (answer,) = answers
        return answer, two.first.num_ends == 0
