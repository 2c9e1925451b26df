"""Kills engines under streams: is every stream the same as in a run that nobody disturbed, and how
long does it stand still?

    python benchmarks/recovery.py [--dp-size 2] [--kills 20] [--streams 64] [--signal KILL]
    python benchmarks/recovery.py --kills 30 --every 60      # a soak of half an hour
    python benchmarks/recovery.py --dp-size 1 --streams 32 --options="--tp-size 2"  # any rank

One server with the default model. All streams start at once; as soon as each has its first piece,
an engine is ended by the signal, and the next round begins when all streams have ended and all
engines are ready. The kinds of streams take turns: chat, a JSON schema, four choices with a seed at
temperature 1, logprobs, penalties, stop strings. A stream is lost if it ends with an error or
without an end; otherwise what it has sent is compared with the same stream of an undisturbed round.
The pause of a stream is its longest time without a piece, less its longest in an undisturbed round.
With --every, undisturbed rounds follow each other until the next kill is due. At the end the
frontend's memory and open files are compared with those after the first kill, and each engine must
have given back all tokens of its pool.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from contenders import SetpointServer
from machine import environment

from setpoint.launch.parent.process import ranks_of
from setpoint_testing.server_process import engines_of

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "array", "items": {"type": "integer"}, "minItems": 30}},
    "required": ["n"],
}
COMMON = {"model": "default", "stream": True, "max_tokens": 80, "seed": 11}
KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("chat", "chat", {"temperature": 1}),
    (
        "JSON schema",
        "chat",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
    ),
    ("n = 4", "completions", {"n": 4, "temperature": 1, "ignore_eos": True}),
    ("logprobs", "completions", {"logprobs": 3, "ignore_eos": True}),
    ("penalties", "completions", {"frequency_penalty": 0.7, "temperature": 1, "ignore_eos": True}),
    ("stop strings", "completions", {"stop": ["the end", " and then"], "temperature": 1}),
]
LIMIT_S = 600.0
SETTLE_S = 1.0
"""So long after a round, the server has closed the connections of its streams."""
METRIC = re.compile(
    r"sglang:(?P<name>max_total_num_tokens|kv_available_tokens|kv_evictable_tokens)"
    r'\{(?:.*dp_rank="(?P<rank>\d+)")?.*\} (?P<value>\S+)'
)


@dataclass
class Stream:
    """What one stream has sent."""

    kind: str
    parts: dict[int, list[Any]] = field(default_factory=dict)
    """Choice -> texts and logprobs."""
    ends: dict[int, str] = field(default_factory=dict)
    error: str = ""
    pause_s: float = 0.0
    has_begun: bool = False

    @property
    def content(self) -> dict[int, tuple[str, str, str]]:
        return {
            index: (
                "".join(text for text, _ in parts),
                ",".join(logprobs for _, logprobs in parts if logprobs),
                self.ends.get(index, ""),
            )
            for index, parts in self.parts.items()
        }

    def take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = str(chunk["error"])
            return
        self.has_begun = True
        for choice in chunk["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            logprobs = choice.get("logprobs") or {}
            found = json.dumps(logprobs.get("token_logprobs") or [])[1:-1]
            self.parts.setdefault(choice["index"], []).append((text, found))
            if choice.get("finish_reason"):
                self.ends[choice["index"]] = choice["finish_reason"]


async def read(session: aiohttp.ClientSession, url: str, number: int, stream: Stream) -> None:
    _, route, extra = KINDS[number % len(KINDS)]
    prompt = f"Story number {number}: once upon a time"
    body = {**COMMON, **extra}
    if route == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    path = f"{url}/v1/{'chat/completions' if route == 'chat' else 'completions'}"
    last = None
    try:
        async with asyncio.timeout(LIMIT_S), session.post(path, json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    stream.pause_s = max(stream.pause_s, 0.0 if last is None else now - last)
                    last = now
                    stream.take(json.loads(line[6:]))
    except (aiohttp.ClientError, TimeoutError) as error:
        stream.error = repr(error)
    if not stream.ends and not stream.error:
        stream.error = "it has no end"


async def round_of(url: str, count: int, disturb: Callable[[], None] | None) -> list[Stream]:
    streams = [Stream(KINDS[number % len(KINDS)][0]) for number in range(count)]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:
        tasks = [
            asyncio.create_task(read(session, url, number, stream))
            for number, stream in enumerate(streams)
        ]
        if disturb is not None:
            while not all(each.has_begun or each.error or each.ends for each in streams):
                await asyncio.sleep(0.005)
            disturb()
        await asyncio.gather(*tasks)
    return streams


async def all_ready(url: str, count: int, has_standby: bool) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/server_info") as response:
                info = await response.json() if response.status == 200 else {}
            standby = "ready" if has_standby else None
            if len(info.get("internal_states", ())) == count and info["standby"] == standby:
                return
            await asyncio.sleep(0.05)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


async def pools(url: str) -> list[int]:
    """The tokens that no request uses and that are neither free nor cached, for each engine."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        found: dict[str, dict[str, float]] = {}
        for line in (await response.text()).splitlines():
            match = METRIC.match(line)
            if match is not None:
                found.setdefault(match["rank"] or "0", {})[match["name"]] = float(match["value"])
    return [
        int(
            each["max_total_num_tokens"] - each["kv_available_tokens"] - each["kv_evictable_tokens"]
        )
        for _, each in sorted(found.items())
    ]


@dataclass
class Found:
    """What the rounds of a run have shown."""

    expected: list[Stream]
    counts: Counter[str] = field(default_factory=Counter)
    pauses: list[float] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    """The frontend's resident bytes and open files after each kill."""

    def take(self, name: str, streams: list[Stream], *, is_disturbed: bool) -> None:
        for stream, other in zip(streams, self.expected, strict=True):
            same = stream.content == other.content
            self.counts[
                "lost" if stream.error else "same" if same else f"other: {stream.kind}"
            ] += 1
            if stream.error:
                print(f"{name}: {stream.kind}: {stream.error}", file=sys.stderr)
            elif is_disturbed:
                self.pauses.append(max(stream.pause_s - other.pause_s, 0.0))

    def report(self) -> None:
        print(", ".join(f"{name} {number}" for name, number in sorted(self.counts.items())))
        print(
            f"pause of a stream: p50 {statistics.median(self.pauses):.2f} s, p99"
            f" {quantile(self.pauses, 0.99):.2f} s, max {max(self.pauses):.2f} s"
        )
        quarter = max(len(self.memory) // 4, 1)
        for index, (name, unit) in enumerate([("memory, MiB", 1 << 20), ("open files", 1)]):
            values = [each[index] / unit for each in self.memory]
            first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
            print(
                f"the frontend's {name}: {first:.0f} at first, {last:.0f} at last"
                f" (medians of {quarter}), {100 * (last / first - 1):+.1f} %"
            )


async def measure(args: argparse.Namespace) -> int:
    extra = ["--dp-size", str(args.dp_size), "--max-engine-restarts", "1000", "--enable-metrics"]
    has_standby = "--engine-standby" in args.options
    server = SetpointServer(
        "setpoint", [*extra, *shlex.split(args.options)], environment={}, stream=True
    )
    sign, chance = signal.Signals[f"SIG{args.signal}"], random.Random(0)
    try:
        await server.ready()
        frontend = server.processes()["frontend"][0]
        await round_of(server.url, args.streams, None)  # warms the caches of text and code
        found = Found(await round_of(server.url, args.streams, None))
        began = time.monotonic()
        for number in range(args.kills):
            while time.monotonic() - began < number * args.every:
                streams = await round_of(server.url, args.streams, None)
                found.take(f"before round {number}", streams, is_disturbed=False)
            await all_ready(server.url, args.dp_size, has_standby)
            engines = sorted(engines_of(frontend.pid), key=lambda each: each.create_time())
            engine = engines[number % args.dp_size]  # a standby is younger than who serves
            ranks = [engine, *ranks_of(engine.pid)]
            victim = chance.choice(ranks).pid
            streams = await round_of(
                server.url, args.streams, lambda victim=victim: os.kill(victim, sign)
            )
            found.take(f"round {number}", streams, is_disturbed=True)
            await asyncio.sleep(SETTLE_S)
            found.memory.append((frontend.memory_info().rss, frontend.num_fds()))
        await all_ready(server.url, args.dp_size, has_standby)
        held = await pools(server.url)
        print(f"# {environment()}")
        print(
            f"{args.kills} times SIG{args.signal}, {args.dp_size} engines, {args.streams} streams"
            f" {args.options}, {time.monotonic() - began:.0f} s"
        )
        found.report()
        print(f"tokens of the pools that are neither free nor cached at the end: {held}")
        is_same = list(found.counts) == ["same"]
        return int(not is_same or any(held))
    finally:
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dp-size", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--signal", default="KILL", choices=("KILL", "SEGV", "ABRT"))
    parser.add_argument(
        "--every", type=float, default=0.0, help="at least so many seconds from kill to kill"
    )
    parser.add_argument("--options", default="", help="further options of the server")
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
