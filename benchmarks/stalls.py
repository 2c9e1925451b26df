"""Streams while a long prompt is computed, over HTTP: how long they stand still, and how long the
prompt waits for its first token.

    python benchmarks/stalls.py --reps 3 --variant "no interval=--prefill-decode-interval 0"
    --variant "mixed=--enable-mixed-chunk"

Two streams run; when both have a few tokens, a prompt of 4,000 tokens arrives. The gaps between
tokens are those of both streams from start to end, so they include those before and after the
prompt; the longest one is the time for which a reader sees nothing. There is one server per
contender, with the default model and the same prompts, which are new in every repetition; servers
take turns within each repetition, and only one works at a time. If a request fails or yields
another number of tokens, the figures are not used and the exit code is 1. With --name, JSON goes to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import aiohttp
import numpy as np
from contenders import (
    REQUEST_TIMEOUT_S,
    CpuMeter,
    HttpServer,
    SetpointServer,
    complete,
    parse_variant,
)
from machine import environment, save, versions
from report import number
from serving import NUM_THREADS, PACKAGES
from workloads import VOCAB

OURS = "setpoint"


@dataclass(slots=True, frozen=True)
class Scene:
    num_streams: int = 2
    stream_input: int = 32
    stream_output: int = 96
    head_start: int = 8
    """Tokens that every stream has before the long prompt comes."""
    long_input: int = 4000
    long_output: int = 8

    def prompts(self, repetition: int) -> list[list[int]]:
        """The prompts of the streams, then the long one. Repetition -1 is for warming up."""
        rng = np.random.default_rng([57, repetition + 1])
        return [
            rng.integers(*VOCAB, length).tolist()
            for length in (*[self.stream_input] * self.num_streams, self.long_input)
        ]


FULL = Scene()
QUICK = Scene(stream_output=24, head_start=2, long_input=600, long_output=2)


@dataclass(slots=True, frozen=True)
class Sample:
    """One repetition; times in seconds."""

    gaps_s: list[float]
    """The gaps between the tokens of the streams."""
    long_ttft_s: float
    wall_s: float
    """Seconds from the first request to the last token of any request."""
    foreign_share: float
    """The share of the machine's CPU time that other programs used meanwhile."""


async def play(server: HttpServer, scene: Scene, repetition: int) -> Sample:
    *short, long = scene.prompts(repetition)
    left = [scene.head_start] * scene.num_streams
    started = asyncio.Event()

    def seen(stream: int) -> None:
        left[stream] -= 1
        if max(left) <= 0:
            started.set()

    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        meter, begin = CpuMeter(server.processes()), time.perf_counter()
        streams = [
            group.create_task(
                complete(
                    session,
                    server.url,
                    prompt,
                    scene.stream_output,
                    True,
                    lambda index=index: seen(index),
                )
            )
            for index, prompt in enumerate(short)
        ]
        await started.wait()
        answer = await complete(session, server.url, long, scene.long_output, True)
        received = [await stream for stream in streams]
        wall = time.perf_counter() - begin
        _, foreign = meter.read()
    gaps = [
        later - earlier for stream in received for earlier, later in pairwise(stream.chunks_s[:-1])
    ]
    return Sample(gaps, answer.first_s, wall, foreign)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument(
        "--model-path", help="what `setpoint serve --model-path` takes; default: the default model"
    )
    parser.add_argument(
        "--server-args", default="", help="further arguments for every server, in one string"
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        help="NAME=[ENV=VALUE …] [--flag value …]: one more server to compare",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a short prompt, one repetition: does everything work?"
    )
    parser.add_argument(
        "--name",
        help=(
            "keep the figures in benchmarks/results/<date>-<name>.json; without it they are only"
            " printed"
        ),
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


async def measure(args: argparse.Namespace, scene: Scene, results: dict[str, list[Sample]]) -> None:
    """Add the samples to ``results`` one by one. The order of the contenders is reversed in every
    other repetition."""
    model = [] if args.model_path is None else ["--model-path", args.model_path]
    common = [
        *model,
        "--dtype",
        "bfloat16",
        "--num-threads",
        str(NUM_THREADS),
        *shlex.split(args.server_args),
    ]
    contenders = [(OURS, [], {}), *map(parse_variant, args.variant)]
    with ExitStack() as stack:
        servers = []
        for name, extra, environ in contenders:
            servers.append(
                SetpointServer(name, [*common, *extra], environment=environ, stream=True)
            )
            stack.callback(servers[-1].close)
        for server in servers:
            await server.ready()
            await play(server, QUICK, -1)
            results[server.name] = []
        for repetition in range(args.reps):
            for server in servers if repetition % 2 == 0 else reversed(servers):
                sample = await play(server, scene, repetition)
                results[server.name].append(sample)
                print(
                    f"#{repetition} {server.name}: longest gap {max(sample.gaps_s):.2f} s",
                    file=sys.stderr,
                    flush=True,
                )


def table(results: dict[str, list[Sample]]) -> str:
    """The table in Markdown: a row per contender, with percentiles of the gaps of all repetitions,
    and medians of the other figures."""
    lines = [
        (
            "| contender | ITL p50, p99, max, ms | TTFT of the long prompt, s | wall, s | used by"
            " others |"
        ),
        "|---|---|---|---|---|",
    ]
    for name, samples in results.items():
        gaps = np.array([gap for sample in samples for gap in sample.gaps_s]) * 1e3
        itl = ", ".join(
            number(float(value)) for value in (*np.percentile(gaps, (50, 99)), gaps.max())
        )
        ttft, wall, foreign = (
            statistics.median(getattr(sample, field) for sample in samples)
            for field in ("long_ttft_s", "wall_s", "foreign_share")
        )
        lines.append(f"| {name} | {itl} | {number(ttft)} | {number(wall)} | {foreign:.0%} |")
    return "\n".join(lines)


def keep(
    args: argparse.Namespace, scene: Scene, results: dict[str, Sequence[Sample]], load: float
) -> Path:
    figures = {
        "scene": asdict(scene),
        "samples": {name: [asdict(one) for one in samples] for name, samples in results.items()},
    }
    return save(args.results, args.name, figures, packages=versions(*PACKAGES), load=load)


def main() -> int:
    args = parse()
    scene = QUICK if args.quick else FULL
    if args.quick:
        args.reps = 1
    load = os.getloadavg()[0]
    print(f"{environment(*PACKAGES)}; load average before: {load:.2f}\n", flush=True)
    results: dict[str, list[Sample]] = {}
    try:
        asyncio.run(measure(args, scene, results))
    except ExceptionGroup as failed:
        print(*(f"FAILED: {error}" for error in failed.exceptions), sep="\n", file=sys.stderr)
        return 1
    print(table(results))
    if args.name is not None:
        print(f"\nwritten: {keep(args, scene, results, load)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
