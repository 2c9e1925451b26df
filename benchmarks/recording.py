"""A recorded server under mixed traffic: does a replay make the same plans, how large is the file,
and what does recording cost?

    python benchmarks/recording.py [--requests 5000] [--turns 8] [--only replay|cost]

Replay: requests over HTTP with priorities, prompts in chunks, growing conversations, clients that
leave, and a pool too small for all; then `setpoint replay`. Cost: two servers, one recorded, take
turns on the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from machine import environment

from setpoint.bench.http_client import ExchangeError, Server
from setpoint.core.records import StepDone
from setpoint.recording.codec import as_record
from setpoint.recording.format import KeptMessage, KeptPlan, KeptRecord
from setpoint.recording.recording_reader import open_recording
from setpoint_testing.server_process import ServerProcess, running_server

STALL_S = 120.0
SMALL = (
    *("--max-total-tokens", "1200", "--max-running-requests", "40"),
    *("--chunked-prefill-size", "48", "--schedule-conservativeness", "0.05"),
    *("--schedule-policy", "priority", "--max-queued-requests", "10000"),
)
PLAIN = ("--max-total-tokens", "40000")


class Client:
    """Some hundred conversations, each of which continues with its answers."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self._server = Server(server.url)
        self._rng = random.Random(seed)
        self._histories = [self._ids(self._rng.choice([4, 8, 60])) for _ in range(100)]
        self.counts: Counter[str] = Counter()

    async def send(self, number: int) -> None:
        rng = self._rng
        history = rng.choice(self._histories)
        if len(history) > 70:
            del history[20:]
        history += self._ids(rng.randint(1, 20))
        body = {
            "input_ids": list(history),
            "priority": rng.choice([0, 0, 0, 0, 0, 0, 5, 20]),
            "sampling_params": {
                "max_new_tokens": rng.choice([2, 4, 8, 96]),
                "temperature": rng.choice([0.0, 0.8]),
                "stop_token_ids": [rng.randrange(1000)],
            },
        }
        leaves_after = rng.uniform(0.05, 2.0) if rng.random() < 0.08 else None
        try:
            async with asyncio.timeout(leaves_after):
                answer = await ask(self._server, body)
        except TimeoutError:
            self.counts["left"] += 1
            return
        if answer is None:
            self.counts["failed"] += 1
            return
        self.counts["answered"] += 1
        history += answer["output_ids"]

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(100, 40_000) for _ in range(count)]


async def ask(server: Server, body: dict[str, Any]) -> dict[str, Any] | None:
    """The answer to a request; None if it failed."""
    try:
        answer = await server.post("/generate", json.dumps(body).encode(), stall_s=STALL_S)
    except ExchangeError:
        return None
    return json.loads(answer.body) if answer.status == 200 else None


async def mixed_traffic(server: ServerProcess, num_requests: int) -> Counter[str]:
    client, gate = Client(server, seed=1), asyncio.Semaphore(160)

    async def one(number: int) -> None:
        async with gate:
            await client.send(number)

    await asyncio.gather(*map(one, range(num_requests)))
    return client.counts


def replays(folder: Path, num_requests: int, content: str) -> None:
    path = folder / f"{content}.rec"
    arguments = [*SMALL, "--record", str(path), "--record-content", content]
    with running_server(folder / content, *arguments) as server:
        began = time.perf_counter()
        counts = asyncio.run(mixed_traffic(server, num_requests))
        took = time.perf_counter() - began
    print(f"\ncontent {content}: {num_requests} requests in {took:.0f} s: {dict(counts)}")
    recording, kinds, tokens, chunks = open_recording(path), Counter(), 0, 0
    for row in recording:
        kinds[row.kind if isinstance(row, KeptRecord) else type(row).__name__] += 1
        if isinstance(row, KeptMessage):
            kinds[message_kind(row)] += 1
        if isinstance(row, KeptRecord):
            record = as_record(row, recording.header.fields)
            tokens += record.num_sampled if isinstance(record, StepDone) else 0
        if isinstance(row, KeptPlan):
            chunks += row.rows["samples"].count(0) == len(row.rows["samples"])
    size = sum(each.stat().st_size for each in recording.segments)
    print(f"{dict(kinds)}, {tokens} tokens, {chunks} steps that only read a piece of a prompt")
    print(
        f"{size / 1e6:.2f} MB: {size / num_requests:.0f} bytes a request,"
        f" {size / kinds['KeptPlan']:.0f} a step, {size / tokens:.1f} an output token"
    )
    done = subprocess.run(
        [sys.executable, "-m", "setpoint.cli", "replay", str(path)], capture_output=True, text=True
    )
    print(f"{done.stdout.strip()} (exit code {done.returncode}){done.stderr}", flush=True)


def message_kind(row: KeptMessage) -> str:
    return str(msgspec.msgpack.decode(bytes(row.message))["type"])


async def one_turn(server: ServerProcess, seed: int) -> float:
    """The output tokens per second of 64 requests at once."""
    rng, http = random.Random(seed), Server(server.url)
    bodies = [
        {
            "input_ids": [rng.randrange(100, 40_000) for _ in range(64)],
            "sampling_params": {"max_new_tokens": 48, "temperature": 0.0, "ignore_eos": True},
        }
        for _ in range(64)
    ]
    began = time.perf_counter()
    answers = await asyncio.gather(*(ask(http, body) for body in bodies))
    took = time.perf_counter() - began
    assert all(answer is not None for answer in answers)
    return 64 * 48 / took


def cost(folder: Path, num_turns: int) -> None:
    recorded = ("--record", str(folder / "cost.rec"))
    with (
        running_server(folder / "plain", *PLAIN) as plain,
        running_server(folder / "recorded", *PLAIN, *recorded) as other,
    ):
        rates: dict[str, list[float]] = {"plain": [], "recorded": []}
        for turn in range(-1, num_turns):
            order = [("plain", plain), ("recorded", other)]
            for name, server in order if turn % 2 else reversed(order):
                rate = asyncio.run(one_turn(server, turn))
                if turn >= 0:
                    rates[name].append(rate)
    for name, values in rates.items():
        shown = ", ".join(f"{value:.0f}" for value in values)
        print(f"{name}: median {statistics.median(values):.0f} tok/s ({shown})")
    ratios = [one / two for one, two in zip(rates["recorded"], rates["plain"], strict=True)]
    print(
        f"recorded / plain: median {statistics.median(ratios):.3f}"
        f" ({min(ratios):.3f} to {max(ratios):.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--turns", type=int, default=8, help="of each server")
    parser.add_argument("--only", choices=("replay", "cost"))
    options = parser.parse_args()
    print(environment("torch", "msgspec"))
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "cost":
            replays(Path(folder), options.requests, "off")
            replays(Path(folder), options.requests // 5, "on")
        if options.only != "replay":
            cost(Path(folder), options.turns)


if __name__ == "__main__":
    main()
