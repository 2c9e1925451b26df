"""What the options of docs/tuning.md do on this machine: each is changed on a real server of the
default model, back and forth (A B A B), under a load that shows the difference.

    python benchmarks/tuning.py             # all of them: about 12 minutes on two quiet cores
    python benchmarks/tuning.py --only schedule_policy,page_size
    python benchmarks/tuning.py --quick     # tiny loads: does everything work?

Options that are live are changed on one running server; for the others, two servers take turns.
Before each turn the server is idle and its prefix cache is empty. A whole run writes
benchmarks/results/<date>-tuning.json and the measured cells of docs/tuning.md; --only and --quick
print their figures, and keep them only in a folder that --results names.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from contenders import CpuMeter, SetpointServer, StartError
from machine import PACKAGES, environment, save, versions
from tuning_knobs import COMPARISONS, POOL, Comparison, Side
from tuning_page import PAGE, RESULTS, cell, with_newest_result

START_TIMEOUT_S = 300.0
"""With --enable-torch-compile, and on a busy machine."""
IDLE_TIMEOUT_S = 300.0
"""How long the requests of a turn may take to end after their clients have left."""


class Bench:
    """The servers of one comparison: one if both sides have the same arguments, else two."""

    def __init__(self, comparison: Comparison, stack: ExitStack) -> None:
        self._comparison = comparison
        self._servers: dict[tuple[str, ...], SetpointServer] = {}
        self.facts: dict[str, Any] = {}
        """What ``/server_info`` says about the kernels."""
        for side in (comparison.a, comparison.b):
            if side.arguments not in self._servers:
                arguments = [*comparison.arguments, *side.arguments]
                server = SetpointServer(
                    comparison.name,
                    arguments,
                    environment={},
                    stream=True,
                    start_timeout_s=START_TIMEOUT_S,
                )
                stack.callback(server.close)
                self._servers[side.arguments] = server

    async def ready(self) -> None:
        for server in self._servers.values():
            await server.ready()
        for side in (self._comparison.a, self._comparison.b):
            server = self._servers[side.arguments]
            await self._prepare(server, side)
            await (side.traffic or self._comparison.traffic).warm_up().run(server, -1)

    async def _prepare(self, server: SetpointServer, side: Side) -> None:
        """Make the server idle, empty its prefix cache, and change its options."""
        timeout = aiohttp.ClientTimeout(total=IDLE_TIMEOUT_S + 30)
        async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
            async with session.post(f"/flush_cache?timeout={IDLE_TIMEOUT_S:g}") as answer:
                if answer.status != 200:
                    raise RuntimeError(f"not idle: {await answer.text()}")
            if side.live:
                body = {"server_args": dict(side.live), "why": "benchmarks/tuning.py"}
                async with session.post("/set_internal_state", json=body) as answer:
                    if answer.status != 200:
                        raise RuntimeError(f"{side.live} was refused: {await answer.text()}")

    async def turn(self, side: Side, number: int) -> dict[str, float]:
        server = self._servers[side.arguments]
        await self._prepare(server, side)
        meter = CpuMeter(server.processes())
        figures = await (side.traffic or self._comparison.traffic).run(server, number)
        _, foreign = meter.read()
        async with (
            aiohttp.ClientSession(server.url) as session,
            session.get("/server_info") as answer,
        ):
            info = await answer.json()
        self.facts = {"kernel_level": info["kernel_level"]}
        figures[POOL.name] = info["max_total_num_tokens"]
        return {**figures, "foreign_share": foreign}


async def measure(comparison: Comparison, repetitions: int) -> dict[str, Any]:
    """The record of one comparison."""
    samples: dict[str, list[dict[str, float]]] = {"a": [], "b": []}
    with ExitStack() as stack:
        bench = Bench(comparison, stack)
        await bench.ready()
        for repetition in range(repetitions):
            for name, side in (("a", comparison.a), ("b", comparison.b)):
                sample = await bench.turn(side, repetition)
                samples[name].append(sample)
                shown = ", ".join(
                    f"{figure.name} {sample[figure.name]:.4g} {figure.unit}".rstrip()
                    for figure in comparison.figures
                )
                print(
                    f"    {side.label}: {shown} (others used {sample['foreign_share']:.0%})",
                    flush=True,
                )
    return {
        "name": comparison.name,
        "knob": comparison.knob,
        "load": comparison.load,
        "arguments": list(comparison.arguments),
        **{
            name: {"label": side.label, "arguments": list(side.arguments), "live": dict(side.live)}
            for name, side in (("a", comparison.a), ("b", comparison.b))
        },
        "figures": [figure.name for figure in comparison.figures],
        "samples": samples,
        **bench.facts,
    }


def quick(comparison: Comparison) -> Comparison:
    b = comparison.b
    if b.traffic is not None:
        b = replace(b, traffic=b.traffic.quick())
    return replace(comparison, b=b, traffic=comparison.traffic.quick())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(each.name for each in COMPARISONS)
    parser.add_argument("--only", default="", help=f"some of: {names}")
    parser.add_argument("--reps", type=int, default=2, help="turns of each side")
    parser.add_argument("--quick", action="store_true", help="tiny loads, one turn of each side")
    parser.add_argument("--results", type=Path, help="folder to keep the figures in")
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> list[Comparison]:
    known = {comparison.name: comparison for comparison in COMPARISONS}
    names = args.only.split(",") if args.only else list(known)
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--only: {', '.join(unknown)} is none of {', '.join(known)}")
    return [quick(known[name]) if args.quick else known[name] for name in names]


def main() -> int:
    args = parse()
    comparisons, load, began = chosen(args), os.getloadavg()[0], time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers end, too
    repetitions = 1 if args.quick else args.reps
    is_whole = not args.only and not args.quick
    print(f"{environment(*PACKAGES)}; load average before: {load:.2f}")
    print(f"{len(comparisons)} comparisons, {repetitions} turns of each side", flush=True)
    records, failed = [], []
    for number, comparison in enumerate(comparisons, 1):
        a, b = comparison.a.label, comparison.b.label
        print(
            f"\n[{number}/{len(comparisons)}, {time.monotonic() - began:.0f} s]"
            f" {comparison.knob}: {a} → {b}; {comparison.load}",
            flush=True,
        )
        try:
            records.append(asyncio.run(measure(comparison, repetitions)))
        except (StartError, RuntimeError, ExceptionGroup, aiohttp.ClientError) as error:
            failed.append(comparison.name)
            print(f"    FAILED: {error}", file=sys.stderr, flush=True)
            continue
        print(f"  = {cell(records[-1])}", flush=True)
    folder = args.results or (RESULTS if is_whole and not failed else None)
    if folder is not None:
        figures = {
            "load_average_after": os.getloadavg()[0],
            "seconds": time.monotonic() - began,
            "comparisons": records,
        }
        print(save(folder, "tuning", figures, packages=versions(*PACKAGES), load=load))
    if is_whole and not failed and args.results is None:
        PAGE.write_text(with_newest_result(PAGE.read_text()))
        print(f"written: {PAGE.name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
