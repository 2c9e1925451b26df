"""Probes while a burst arrives: how long ``/ready`` and ``/health`` take on a new connection while
many clients connect and ask at once.

    python benchmarks/probes.py
    python benchmarks/probes.py --busy --connections 500,2000

One server with the default model. A process opens all connections of a burst as fast as it can and
sends one short request on each; another opens a new connection for a probe every 20 ms, whether the
last one was answered or not, and takes the time from its connect to the end of its answer. Probes
count from the burst's first connection until its last answer; the first second has a row of its
own, because that is when everybody arrives. With --busy a loop spins on every core meanwhile. The
exit code is 1 if a request or a probe is not answered with 200.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import multiprocessing
import os
import resource
import selectors
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from urllib.parse import urlsplit

import numpy as np
from contenders import SetpointServer
from machine import environment

PATHS = ("/ready", "/health")
EVERY_S = 0.02
ARRIVAL_S = 1.0
MAX_CONNECTIONS = 4000
BURST_LIMIT_S = 600.0
PROBE_LIMIT_S = 60.0

BODIES = {
    "/generate": {
        "text": "The capital of France is",
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
    },
    "/v1/chat/completions": {
        "model": "default",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 4,
    },
}


@dataclass(slots=True, frozen=True)
class Burst:
    began: float
    """Seconds of time.monotonic(), which all processes share; like the next two."""
    sent: float
    """When the last request was sent."""
    ended: float
    statuses: dict[str, int]


@dataclass(slots=True, frozen=True)
class Probe:
    path: str
    began: float
    took_s: float
    status: str


def burst(address: tuple[str, int], route: str, num_connections: int) -> Burst:
    """Connect ``num_connections`` times, send a request on each, and read all answers."""
    _allow_sockets(num_connections)
    request = _request("POST", route, json.dumps(BODIES[route]).encode())
    waiting = selectors.DefaultSelector()
    began = time.monotonic()
    for _ in range(num_connections):
        sock = socket.socket()
        sock.setblocking(False)
        if sock.connect_ex(address) not in (0, errno.EINPROGRESS):
            raise OSError("Cannot connect.")
        waiting.register(sock, selectors.EVENT_WRITE, bytearray())
    statuses: Counter[str] = Counter()
    sent = began
    while waiting.get_map():
        if time.monotonic() > began + BURST_LIMIT_S:
            statuses["no answer"] = len(waiting.get_map())
            break
        for key, events in waiting.select(1.0):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if events & selectors.EVENT_WRITE:
                connection.send(request)
                sent = time.monotonic()
                waiting.modify(connection, selectors.EVENT_READ, key.data)
            elif (status := _read(connection, key.data)) is not None:
                statuses[status] += 1
                waiting.unregister(connection)
                connection.close()
    return Burst(began, sent, time.monotonic(), dict(statuses))


def _read(connection: socket.socket, answer: bytearray) -> str | None:
    """Read what has arrived into ``answer``; returns its status once the server has closed the
    connection, until then None."""
    try:
        piece = connection.recv(1 << 16)
    except ConnectionResetError:
        return "reset"
    answer += piece
    return None if piece else answer[9:12].decode() or "nothing"


def probe(address: tuple[str, int], over: Event) -> list[Probe]:
    """Probe until ``over`` is set."""
    _allow_sockets(MAX_CONNECTIONS)

    async def one(path: str) -> Probe:
        began = time.monotonic()
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(_request("GET", path))
                answer = await reader.read()
                writer.close()
        except (OSError, TimeoutError) as error:
            return Probe(path, began, time.monotonic() - began, type(error).__name__)
        return Probe(path, began, time.monotonic() - began, answer[9:12].decode())

    async def every() -> list[Probe]:
        running, turn = [], time.monotonic()
        while not over.is_set():
            running += [asyncio.create_task(one(path)) for path in PATHS]
            turn += EVERY_S
            await asyncio.sleep(turn - time.monotonic())
        return await asyncio.gather(*running)

    return asyncio.run(every())


def _request(method: str, path: str, body: bytes = b"") -> bytes:
    """The bytes of a request that asks the server to close the connection after the answer."""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    if body:
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


def _allow_sockets(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(count + 100, hard)), hard))


def _spin() -> None:
    while True:
        pass


@contextmanager
def spinning(num_cores: int) -> Iterator[None]:
    """Inside this block ``num_cores`` processes do nothing but compute."""
    processes = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(num_cores)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def measured(url: str, route: str, num_connections: int) -> tuple[Burst, list[Probe]]:
    address = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
    with multiprocessing.Manager() as shared, multiprocessing.Pool(2) as pool:
        over = shared.Event()
        probing = pool.apply_async(probe, (address, over))
        time.sleep(1.0)  # until the process that sends the probes has started
        bursting = pool.apply_async(burst, (address, route, num_connections))
        done = bursting.get()
        over.set()
        return done, probing.get()


def rows(name: str, done: Burst, probes: Sequence[Probe]) -> list[str]:
    """Two rows of the table: for the whole burst, and for its first second."""
    found = []
    for what, end in (
        (f"{name}: {done.ended - done.began:.1f} s", done.ended),
        (f"its first {ARRIVAL_S:g} s", done.began + ARRIVAL_S),
    ):
        cells = []
        for path in PATHS:
            took = [
                each.took_s * 1e3
                for each in probes
                if each.path == path and done.began <= each.began < end
            ]
            cells.append(
                ", ".join(f"{value:.0f}" for value in (*np.percentile(took, (50, 99)), max(took)))
            )
        found.append(f"| {what} | {' | '.join(cells)} |")
    return found


def failures(done: Burst, probes: Sequence[Probe]) -> list[str]:
    answers = Counter(done.statuses) + Counter(each.status for each in probes)
    return [f"{count} x {status}" for status, count in answers.items() if status != "200"]


async def measure(args: argparse.Namespace) -> bool:
    """Print the table; returns whether everything was answered with 200."""
    server = SetpointServer("setpoint", shlex.split(args.server_args), environment={}, stream=False)
    try:
        await server.ready()
        measured(server.url, args.route, 8)
        print(f"| burst | {' | '.join(f'`{path}` p50, p99, max, ms' for path in PATHS)} |")
        print("|---|---|---|")
        failed: list[str] = []
        for num_connections in map(int, args.connections.split(",")):
            with spinning(os.cpu_count() or 1 if args.busy else 0):
                done, probes = measured(
                    server.url, args.route, min(num_connections, MAX_CONNECTIONS)
                )
            print(*rows(f"{num_connections} connections", done, probes), sep="\n", flush=True)
            failed += failures(done, probes)
    finally:
        server.close()
    if failed:
        print(f"Not answered with 200: {', '.join(failed)}", file=sys.stderr)
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--connections", default="500,2000", help="sizes of the bursts, comma-separated"
    )
    parser.add_argument("--route", choices=list(BODIES), default="/generate")
    parser.add_argument("--busy", action="store_true", help="beside a spinning loop on every core")
    parser.add_argument("--server-args", default="", help="further arguments, in one string")
    args = parser.parse_args()
    load = "spinning loops" if args.busy else f"load average {os.getloadavg()[0]:.2f}"
    print(f"{environment('uvicorn', 'uvloop')}; {args.route}; beside {load}\n", flush=True)
    return 0 if asyncio.run(measure(args)) else 1


if __name__ == "__main__":
    sys.exit(main())
