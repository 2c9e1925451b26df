"""`setpoint batch`: killed and resumed, and its throughput compared with that of the same load
through `setpoint serve` over HTTP, in one run.

    python benchmarks/batch.py  # 2,000 requests of 32 tokens in, 1 to 15 out; six minutes
    python benchmarks/batch.py --quick  # does everything work?

First a batch is killed with SIGKILL five times at random moments and started again: every request
must end answered exactly once. Then batch and server take turns, each time as a fresh process with
an empty cache, on the same file of random prompts. Timed is from the first request to the last
answer; loading the model is not. The server's client keeps --concurrency requests open. A failed
request is an error and the exit code 1. With --name, JSON goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from machine import environment, save, versions
from report import Comparison

from setpoint_testing.server_process import running_server

PACKAGES = ("setpoint", "torch", "aiohttp")
VOCAB = (100, 49_000)
"""Ids drawn from this range: no special tokens of the default model."""
ENGINE = ("--dtype", "bfloat16", "--num-threads", "2")
AIM = 0.95


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument(
        "--output-tokens", type=int, default=8, help="on average; from 1 to almost twice as many"
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument(
        "--reps", type=int, default=2, help="repetitions of the throughput measurement"
    )
    parser.add_argument(
        "--concurrency", type=int, default=600, help="requests that the HTTP client keeps open"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts and of the kills")
    parser.add_argument("--quick", action="store_true", help="60 requests, 2 kills, one repetition")
    parser.add_argument(
        "--name",
        help=(
            "keep the figures in benchmarks/results/<date>-<name>.json; without it they are only"
            " printed"
        ),
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.kills, args.reps = 60, 2, 1
    return args


def write_requests(path: Path, args: argparse.Namespace) -> None:
    rng = np.random.default_rng(args.seed)
    with path.open("w") as file:
        for number in range(args.requests):
            prompt = rng.integers(*VOCAB, args.input_tokens).tolist()
            body = {
                "prompt": prompt,
                "max_tokens": int(rng.integers(1, 2 * args.output_tokens)),
                "ignore_eos": True,
                "temperature": 0,
            }
            file.write(
                json.dumps(
                    {
                        "custom_id": f"id-{number}",
                        "method": "POST",
                        "url": "/v1/completions",
                        "body": body,
                    }
                )
                + "\n"
            )


def start_batch(requests: Path, output: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "setpoint.cli",
        "batch",
        str(requests),
        "-o",
        str(output),
        *ENGINE,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def killed_and_resumed(requests: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Kill the batch several times, each after a random number of new answers and up to half a
    second more, then let it finish; returns the figures."""
    rng, output = random.Random(args.seed), folder / "killed.jsonl"
    done_at = []
    for _ in range(args.kills):
        process = start_batch(requests, output)
        target = num_lines(output) + rng.randrange(max(args.requests // (args.kills + 1), 1))
        while num_lines(output) <= target and process.poll() is None:
            time.sleep(0.02)
        time.sleep(rng.random() / 2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done_at.append(num_lines(output))
    code = start_batch(requests, output).wait()
    counts = Counter(json.loads(line)["custom_id"] for line in output.read_bytes().splitlines())
    wrong = [
        f"id-{number}: {counts[f'id-{number}']} times"
        for number in range(args.requests)
        if counts[f"id-{number}"] != 1
    ]
    if code or len(counts) != args.requests:
        wrong.append(f"exit code {code}, {len(counts)} different ids")
    return {"done_at_kill": done_at, "wrong": wrong}


def batch_seconds(requests: Path, folder: Path, repetition: int) -> float:
    """The seconds from the first request to the last answer. Raises RuntimeError if any failed."""
    process = start_batch(requests, folder / f"batch-{repetition}.jsonl")
    output, _ = process.communicate()
    found = re.search(r"This run: \d+ in ([\d.]+) s", output)
    if process.returncode or found is None:
        raise RuntimeError(f"setpoint batch ended with code {process.returncode}: {output}")
    return float(found[1])


def read_bodies(requests: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["body"] for line in requests.read_bytes().splitlines()]


async def server_seconds(
    requests: Path, folder: Path, repetition: int, args: argparse.Namespace
) -> float:
    """The seconds of the same requests over HTTP. Raises RuntimeError if any failed."""
    bodies = iter(read_bodies(requests))

    async def client(session: aiohttp.ClientSession, url: str) -> None:
        for body in bodies:
            async with session.post(url, json=body) as response:
                reply = await response.json()
                if (
                    response.status != 200
                    or reply["usage"]["completion_tokens"] != body["max_tokens"]
                ):
                    raise RuntimeError(f"the server answered {response.status}: {reply}")

    with running_server(
        folder / f"server-{repetition}", *ENGINE, "--log-level", "warning", ready=False
    ) as server:
        # Its log is as quiet as a batch's, so only HTTP shows when it is ready.
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await until_healthy(session, server.url)
            began = time.perf_counter()
            url = f"{server.url}/v1/completions"
            await asyncio.gather(*(client(session, url) for _ in range(args.concurrency)))
            return time.perf_counter() - began


async def until_healthy(session: aiohttp.ClientSession, url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            async with session.get(f"{url}/health") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError("the server was not ready after 120 s")


def report(
    args: argparse.Namespace, tokens: int, batch: Sequence[float], server: Sequence[float]
) -> list[str]:
    """The table, and whether the aim is met. tokens: those of all outputs together."""
    lines = ["| | requests/s | output tok/s | wall s |", "|---|---|---|---|"]
    for name, walls in (("setpoint batch", batch), ("setpoint serve over HTTP", server)):
        middle = float(np.median(walls))
        each = ", ".join(f"{wall:.1f}" for wall in walls)
        lines.append(f"| {name} | {args.requests / middle:.1f} | {tokens / middle:.0f} | {each} |")
    compared = Comparison(batch, server, higher_is_better=False)
    verdict = "met" if compared.ratio >= AIM else "NOT met"
    return [
        *lines,
        "",
        f"aim: batch ≥ {AIM:.0%} of the server's throughput: {verdict} ({compared})",
    ]


def main() -> int:
    args = parse()
    load_before = os.getloadavg()[0]
    print(f"{environment(*PACKAGES)}; load average before: {load_before:.2f}\n", flush=True)
    batch: list[float] = []
    server: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests = folder / "in.jsonl"
        write_requests(requests, args)
        killed = killed_and_resumed(requests, folder, args)
        wrong = killed["wrong"]
        print(
            f"killed {args.kills} times, with {killed['done_at_kill']} of {args.requests} answers"
            " in the file: ",
            end="",
        )
        print(
            f"{len(wrong)} WRONG: {wrong[:5]}" if wrong else "every request answered exactly once",
            flush=True,
        )
        tokens = sum(body["max_tokens"] for body in read_bodies(requests))
        for repetition in range(args.reps):
            batch.append(batch_seconds(requests, folder, repetition))
            server.append(asyncio.run(server_seconds(requests, folder, repetition, args)))
    lines = report(args, tokens, batch, server)
    print("\n" + "\n".join(lines))
    if args.name is not None:
        load = {
            name: getattr(args, name)
            for name in (
                "requests",
                "input_tokens",
                "output_tokens",
                "kills",
                "concurrency",
                "seed",
            )
        }
        figures = {
            "load": load,
            "killed": killed,
            "wall_s": {"batch": batch, "server": server},
            "report": lines,
        }
        path = save(
            args.results, args.name, figures, packages=versions(*PACKAGES), load=load_before
        )
        print(f"\nwritten: {path}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
