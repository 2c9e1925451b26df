"""What streams notice of a long prompt: the time between their tokens on one server with two
threads, and on a decode server with one whose prompts a prefill server with the other one computes.

    python benchmarks/disaggregation.py [--streams 4] [--prompt 4096] [--tokens 200]

Each case has the same streams twice: alone, and while prompts of ``--prompt`` tokens arrive one
after the other. Aim: with two servers, the 99th percentile is at most 1.5 times that of the streams
alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from machine import environment

from setpoint_testing.server_process import free_port, running_server

HOST = "127.0.0.1"
ROOMS = count(1 << 32)
SETTLE_S = 2.0
Targets = tuple[str, str | None, int]
"""URL that streams; URL of the prefill server, if there is one; bootstrap port."""


@contextmanager
def one_server() -> Iterator[Targets]:
    folder = Path(tempfile.mkdtemp())
    with running_server(folder, "--num-threads", "2") as server:
        yield server.url, None, 0


@contextmanager
def two_servers() -> Iterator[Targets]:
    folder, port, one = Path(tempfile.mkdtemp()), free_port(), ("--num-threads", "1")
    mode = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    with (
        running_server(folder / "p", *one, *mode) as prefill,
        running_server(folder / "d", *one, "--disaggregation-mode", "decode") as decode,
    ):
        yield decode.url, prefill.url, port


def with_room(body: dict[str, Any], port: int) -> dict[str, Any]:
    room = {"bootstrap_host": HOST, "bootstrap_port": port, "bootstrap_room": next(ROOMS)}
    return body | room if port else body


async def ask(client: httpx.AsyncClient, targets: Targets, body: dict[str, Any]) -> list[float]:
    """The times at which the pieces of a streamed answer arrived."""
    url, prefill, port = targets
    body = with_room(body, port)
    other = None
    if prefill is not None:
        other = asyncio.create_task(client.post(f"{prefill}/generate", json=body))
    times = []
    async with client.stream("POST", f"{url}/generate", json=body | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                json.loads(line[6:])
                times.append(time.perf_counter())
    if other is not None:
        await other
    return times


def body_of(ids: list[int], num_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling}


async def gaps(
    targets: Targets, *, streams: int, prompt: int, tokens: int, busy: bool, seed: int
) -> tuple[np.ndarray, list[float]]:
    """Times between tokens of the streams, and the seconds that each long prompt took."""
    rng = np.random.default_rng(seed)
    took: list[float] = []

    def ids(number: int) -> list[int]:
        return [int(each) for each in rng.integers(100, 40_000, number)]

    async with httpx.AsyncClient(timeout=600) as client:
        running = [
            asyncio.create_task(ask(client, targets, body_of(ids(32), tokens)))
            for _ in range(streams)
        ]
        await asyncio.sleep(SETTLE_S)
        since = time.perf_counter()
        while busy and not any(each.done() for each in running):
            begun = time.perf_counter()
            await ask(client, targets, body_of(ids(prompt), 1))
            took.append(time.perf_counter() - begun)
        until = time.perf_counter()
        found = [np.array(times) for times in await asyncio.gather(*running)]
    if not busy:
        until = min(times[-1] for times in found)
    within = [np.diff(times[(times >= since) & (times <= until)]) for times in found]
    return np.concatenate(within), took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=200)
    sizes = vars(parser.parse_args())
    print(environment())
    for name, servers in (("one server", one_server()), ("two servers", two_servers())):
        with servers as targets:
            alone, _ = asyncio.run(gaps(targets, **sizes, busy=False, seed=1))
            busy, took = asyncio.run(gaps(targets, **sizes, busy=True, seed=2))
        p50, p99, most = (np.percentile(busy, each) * 1e3 for each in (50, 99, 100))
        idle = np.percentile(alone, 99) * 1e3
        print(
            f"{name:11}: alone p50 {np.percentile(alone, 50) * 1e3:6.1f} ms, p99 {idle:6.1f} ms;"
            f" beside {len(took)} prompts p50 {p50:6.1f}, p99 {p99:6.1f}, longest {most:6.1f} ms;"
            f" p99 {p99 / idle:.2f} times that alone; a prompt took {np.median(took):.2f} s"
        )


if __name__ == "__main__":
    main()
