"""Two machines that serve one model over a bad network: what delay and loss cost, and what happens
when the link is cut. Needs root, for two network namespaces (``setpoint_testing.network``).

    python benchmarks/nodes.py [--model FOLDER] [--tokens 64] [--delay-ms 20] [--loss 0.01]

The answers are compared with those of one process. A delay is that of one direction.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from machine import environment

from setpoint_testing.network import Link, Machine, network, why_no_network
from setpoint_testing.server_process import wait_until
from setpoint_testing.tiny_models import write_tiny_llama

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
    ends: list[float] = field(default_factory=list)
    """When its processes ended."""
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
            self.ends.append(time.monotonic())
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

    def generate(self, ids: Sequence[int], num_tokens: int) -> tuple[list[int], float]:
        """The answer, and the seconds that it took."""
        return self.first.machine.call(_generate, ids, num_tokens)


def _generate(ids: Sequence[int], num_tokens: int) -> tuple[list[int], float]:
    begin = time.monotonic()
    params = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"http://127.0.0.1:{PORT}/generate",
        json={"input_ids": list(ids), "sampling_params": params},
        timeout=REPLY_S,
    )
    answer.raise_for_status()
    return answer.json()["output_ids"], time.monotonic() - begin


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
            return [machine.call(_generate, ids, num_tokens)[0] for ids in PROMPTS]
        finally:
            node.end()


def over(model: Path, logs: Path, link: Link, expected: list[list[int]]) -> dict[str, Any]:
    """The answers over a link, and the time of a token."""
    num_tokens = len(expected[0])
    begin = time.monotonic()
    with pair(model, logs, link) as two:
        start_s = time.monotonic() - begin
        found = [two.generate(ids, num_tokens) for ids in PROMPTS]
        first_s = two.generate(PROMPTS[0], 1)[1]
        sent = link.num_packets
    token_s = (found[0][1] - first_s) / (num_tokens - 1)
    return {
        "start_s": round(start_s, 1),
        "first_token_ms": round(1e3 * first_s),
        "token_ms": round(1e3 * token_s, 1),
        "same": [ids for ids, _ in found] == expected,
        "packets": sent,
        "lost": link.num_lost,
    }


def cut(model: Path, logs: Path, link: Link, expected: list[list[int]]) -> dict[str, Any]:
    """Cut the link while an answer is computed, and mend it after both ends have noticed. Times
    count from the cut, and the last two from the mending."""
    num_tokens = len(expected[1])
    with pair(model, logs, link) as two:
        answers: list[tuple[list[int], float]] = []
        request = threading.Thread(
            target=lambda: answers.append(two.generate(PROMPTS[1], num_tokens)), daemon=True
        )
        before = link.num_packets
        request.start()
        wait_until(lambda: link.num_packets > before + 20)  # it is being computed
        link.is_cut, begin = True, time.monotonic()
        wait_until(lambda: "is lost: " in two.first.said, timeout_s=START_S, every_s=0.1)
        noticed_s = time.monotonic() - begin
        wait_until(lambda: two.second.ends, timeout_s=START_S, every_s=0.1)
        ended_s = two.second.ends[0] - begin
        time.sleep(OUTAGE_S)
        link.is_cut, begin = False, time.monotonic()
        wait_until(lambda: two.first.said.count(" has joined from ") == 2, timeout_s=START_S)
        joined_s = time.monotonic() - begin
        request.join(REPLY_S)
        answered_s = time.monotonic() - begin
        server_lives = not two.first.ends
    return {
        "node_0_noticed_s": round(noticed_s, 1),
        "node_1_ended_s": round(ended_s, 1),
        "joined_again_s": round(joined_s, 1),
        "answered_s": round(answered_s, 1),
        "same": [ids for ids, _ in answers] == [expected[1]],
        "server_lives": server_lives,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--delay-ms", type=float, default=20)
    parser.add_argument("--loss", type=float, default=0.01)
    asked = parser.parse_args()
    if why := why_no_network():
        sys.exit(why)
    print(environment())
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
        model = asked.model or write_tiny_llama(logs / "model", **sizes)
        expected = one_process(model, logs, asked.tokens)
        delay_s = asked.delay_ms / 1e3
        for delay, loss in ((0.0, 0.0), (delay_s, 0.0), (delay_s, asked.loss)):
            result = over(model, logs, Link(delay, loss), expected)
            print(f"delay {1e3 * delay:g} ms, loss {loss:.0%}: {result}", flush=True)
        print("cut:", cut(model, logs, Link(delay_s, asked.loss), expected))


if __name__ == "__main__":
    main()
