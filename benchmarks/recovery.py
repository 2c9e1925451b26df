"""Kills engines under streams: is every stream the same as in a run that nobody disturbed, and how
long does it stand still?

    python benchmarks/recovery.py [--dp-size 2] [--kills 20] [--streams 64] [--signal KILL]

One server with the default model. All streams start at once; as soon as each has its first piece,
an engine is ended by the signal, and the next round begins when all streams have ended and all
engines are ready. The kinds of streams take turns: chat, a JSON schema, four choices with a seed at
temperature 1, logprobs, penalties, stop strings. A stream is lost if it ends with an error or
without an end; otherwise what it has sent is compared with the same stream of an undisturbed round.
The pause of a stream is its longest time without a piece, less its longest in an undisturbed round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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

from setpoint.testing.server_process import engines_of

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
LIMIT_S = 120.0


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


async def measure(args: argparse.Namespace) -> int:
    extra = ["--dp-size", str(args.dp_size), "--max-engine-restarts", "1000"]
    has_standby = "--engine-standby" in args.options
    server = SetpointServer(
        "setpoint", [*extra, *shlex.split(args.options)], environment={}, stream=True
    )
    try:
        await server.ready()
        pid = server.processes()["frontend"][0].pid
        await round_of(server.url, args.streams, None)  # warms the caches of text and code
        expected = await round_of(server.url, args.streams, None)
        counts: Counter[str] = Counter()
        pauses: list[float] = []
        for number in range(args.kills):
            await all_ready(server.url, args.dp_size, has_standby)
            engines = sorted(engines_of(pid), key=lambda each: each.create_time())
            victim = engines[number % args.dp_size].pid  # a standby is younger than who serves
            sign = signal.Signals[f"SIG{args.signal}"]
            found = await round_of(
                server.url,
                args.streams,
                lambda victim=victim, sign=sign: os.kill(victim, sign),
            )
            for stream, other in zip(found, expected, strict=True):
                same = stream.content == other.content
                counts["lost" if stream.error else "same" if same else f"other: {stream.kind}"] += 1
                if stream.error:
                    print(f"round {number}: {stream.kind}: {stream.error}", file=sys.stderr)
                else:
                    pauses.append(max(stream.pause_s - other.pause_s, 0.0))
        print(f"# {environment()}")
        print(
            f"{args.kills} times SIG{args.signal}, {args.dp_size} engines, {args.streams} streams"
            f" {args.options}"
        )
        print(", ".join(f"{name} {number}" for name, number in sorted(counts.items())))
        print(
            f"pause of a stream: p50 {statistics.median(pauses):.2f} s, p99"
            f" {quantile(pauses, 0.99):.2f} s, max {max(pauses):.2f} s"
        )
        return int(counts["same"] != args.kills * args.streams)
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
    parser.add_argument("--options", default="", help="further options of the server")
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
