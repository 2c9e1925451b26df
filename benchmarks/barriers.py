"""What a decode step would take on more cores than were at hand: a simulation, not a measurement.

    python benchmarks/barriers.py [--socket-gbps 230] [--near-ns 37] [--far-ns 156]
    python benchmarks/barriers.py --measure    # the cost of a loop here, beside that of the model

On times of this machine, quiet and with few threads, instead of those in docs/notebook.md:

    setpoint bench one-batch --breakdown --quantization unquant --batch-size 1 64 --input-len 128 \\
        --output-len 33 --output-file steps.jsonl
    python benchmarks/barriers.py --breakdown steps.jsonl

Measured are the times of each kind of kernel of the default model in bf16. Known is how a captured
step divides each kernel into units (threads.h, panels.h, plan.h). Every kernel is then run again on
more threads:

* A unit takes its operations at a core's rate or its bytes at its share of the memory's rate,
  whichever is longer, times the factor by which its kind missed that bound when it was measured.
* A thread that enters or leaves a loop, or looks for units of another, waits for a cache line from
  another core (``Barrier``). Threads take the units one by one, each as soon as it has entered.
* What runs outside the captured step (Python, scheduling, messages) stays as long as it was.

Assumed, because it could not be measured: the memory's rate of a socket (three quarters of eight
channels of DDR5-4800), that the slower of two measured ways of a cache line is the one between
chiplets, that all cores keep the clock of two, and for another model the factors of this one. Not
simulated: caches that hold a whole small model, a second socket, matrix tiles.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from machine import environment
from team_loop import FREE, OWN_S, Barrier, Machine, empty_loop, even, loop

THREADS = (1, 2, 4, 8, 16, 32, 64)
BATCHES = (1, 64)
CONTEXT = 144
"""Tokens behind each row: the mean of a run with 128 tokens in and 33 out."""
KERNELS = Path(__file__).parents[1] / "src/setpoint/engine/kernels/cpu"
BF16 = 2

# threads.h, panels.h and plan.h, without matrix tiles.
PANEL = 32
UNIT_ROWS = 48
BATCH_BYTES = 512 * 1024
WORTH_IT = 4096
BLOCK = 128
STRIP_ROWS = 6
ITEMS_PER_THREAD = 8


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


DEFAULT_MODEL = Shape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152)
ONE_BILLION = Shape("the shape of Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128256)


MEASURED_ON = Machine(472e9 / 2, 28e9, 31.2e9, 163e9 / 2)
"""Two cores of Zen 4. docs/notebook.md, "where a step's time goes"; one core's rate of memory:
decision 0003."""


@dataclass(frozen=True)
class Times:
    """Seconds of the parts of a decode step, measured on ``threads`` threads of ``machine``."""

    threads: int
    machine: Machine
    kinds: Mapping[str, float]
    """Kind of kernel -> seconds of all its calls."""
    outside: float
    """Time outside the kernels of the captured step."""


NOTEBOOK = {
    1: Times(
        2,
        MEASURED_ON,
        {"linear": 8140e-6, "head": 2003e-6, "attention": 342e-6, "elementwise": 116e-6},
        (267 + 195) * 1e-6,
    ),
    64: Times(
        2,
        MEASURED_ON,
        {"linear": 33797e-6, "head": 8871e-6, "attention": 10889e-6, "elementwise": 1786e-6},
        (267 + 448) * 1e-6,
    ),
}
"""docs/notebook.md, "where a step's time goes" (replayed steps), and for what is outside "the first
touch of torch after the weights" and the scheduling of either entry."""


@dataclass(frozen=True)
class Kernel:
    """One kernel and how often a step calls it."""

    kind: str
    calls: int
    num_bytes: float
    """Bytes that one call reads."""
    flops: float
    units: tuple[float, ...]
    """The share of each unit in the work. If there is only one unit, it runs on the first thread
    without a loop."""
    cached: bool = False
    """Whether its bytes come from the core's own caches."""

    def seconds(self, threads: int, machine: Machine, barrier: Barrier, factor: float) -> float:
        """The seconds of all calls."""

        def speed(active: int) -> float:
            """The calls per second of one thread if ``active`` threads work at once."""
            rate = machine.cache_bytes if self.cached else machine.read_bytes(active)
            return 1 / (factor * max(self.num_bytes / rate, self.flops / machine.core_flops))

        if threads == 1 or len(self.units) == 1:
            return self.calls / speed(1)
        return self.calls * loop(self.units, threads, barrier, speed)


def product_units(columns: int, k: int, rows: int) -> int:
    """The number of units that ``for_panels`` (panels.h) makes of a bf16 product."""
    fitting = max(BATCH_BYTES // (k * BF16), UNIT_ROWS)
    batches = -(-rows // fitting)
    each = -(-rows // batches)
    return -(-columns // PANEL) * batches * -(-each // UNIT_ROWS)


def row_units(rows: int, elements: int) -> int:
    """The number of units that ``for_rows`` (threads.h) makes inside a team."""
    if rows * elements < WORTH_IT:
        return 1
    return -(-rows // (WORTH_IT // 2 // elements + 1))


def attention_units(shape: Shape, rows: int, context: int, threads: int) -> tuple[float, ...]:
    """Each item's share of the keys, as ``AttentionPlan`` (plan.h) divides decode rows that share
    no block."""
    blocks, group = -(-context // BLOCK), shape.heads // shape.kv_heads
    cost = blocks * shape.kv_heads * (8 + group)
    largest = rows * cost if threads == 1 else rows * cost // (threads * ITEMS_PER_THREAD)
    pieces = -(-cost // largest) if largest else cost
    heads = max(1, shape.kv_heads * blocks // max(pieces, blocks)) if group <= STRIP_ROWS else 1
    parts = -(-shape.kv_heads // heads)
    run = -(-blocks // min(-(-pieces // parts), blocks))
    total = rows * context * shape.kv_heads
    return tuple(
        (min((block + run) * BLOCK, context) - block * BLOCK)
        * (min(head + heads, shape.kv_heads) - head)
        / total
        for _ in range(rows)
        for block in range(0, blocks, run)
        for head in range(0, shape.kv_heads, heads)
    )


def kernels(shape: Shape, rows: int, threads: int, context: int = CONTEXT) -> list[Kernel]:
    """The kernels of a captured decode step."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    products = [
        ("linear", shape.layers, q + 2 * kv, shape.hidden),
        ("linear", shape.layers, shape.hidden, q),
        ("linear", shape.layers, 2 * shape.inner, shape.hidden),
        ("linear", shape.layers, shape.hidden, shape.inner),
        ("head", 1, shape.vocab, shape.hidden),
    ]
    found = [
        Kernel(kind, calls, n * k * BF16, 2 * rows * n * k, even(product_units(n, k, rows)))
        for kind, calls, n, k in products
    ]
    keys = rows * context
    found.append(
        Kernel(
            "attention",
            shape.layers,
            2 * keys * kv * BF16,
            4 * keys * q,
            attention_units(shape, rows, context, threads),
        )
    )
    for calls, elements, passes in (
        (2 * shape.layers + 1, shape.hidden, 4),  # norms
        (shape.layers, q + 2 * kv, 2),  # rotation and store
        (1, shape.hidden, 2),  # embedding
    ):
        num_bytes = passes * rows * elements * BF16
        units = even(row_units(rows, elements))
        found.append(Kernel("elementwise", calls, num_bytes, 0, units, cached=True))
    return found


def factors(times: Times, shape: Shape, rows: int, barrier: Barrier) -> dict[str, float]:
    """Kind -> how many times as long as its bound it took, without the loops."""
    found = {}
    for kind, measured in times.kinds.items():
        of_kind = [each for each in kernels(shape, rows, times.threads) if each.kind == kind]
        work, whole = (
            sum(each.seconds(times.threads, times.machine, how, 1.0) for each in of_kind)
            for how in (FREE, barrier)
        )
        found[kind] = (measured - (whole - work)) / work
    return found


def step(
    shape: Shape,
    rows: int,
    threads: int,
    machine: Machine,
    barrier: Barrier,
    factor: Mapping[str, float],
    outside: float,
) -> float:
    """The seconds of one decode step."""
    return outside + sum(
        each.seconds(threads, machine, barrier, factor[each.kind])
        for each in kernels(shape, rows, threads)
    )


def read_times(path: Path) -> dict[int, Times]:
    """Batch size -> times, from the lines that ``bench one-batch --breakdown`` has written. Raises
    ValueError for another model than the default one in bf16."""
    found = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        rows, limits = record["batch_size"], record["limits"]
        if "breakdown" not in record or limits is None:
            raise ValueError(f"{path}: a line without a breakdown and limits")
        parts, threads = record["breakdown"]["decode"]["parts"], limits["threads"]
        weights = sum(
            each.calls * each.num_bytes
            for each in kernels(DEFAULT_MODEL, rows, threads)
            if each.kind in ("linear", "head")
        )
        if not math.isclose(
            parts["linear"]["num_bytes"] + parts["head"]["num_bytes"], weights, rel_tol=0.01
        ):
            raise ValueError(f"{path}: not {DEFAULT_MODEL.name} in bf16 (--quantization unquant)")
        reads = {int(size): rate for size, rate in limits["read_bytes_per_s"].items()}
        found[rows] = Times(
            threads,
            replace(
                MEASURED_ON,
                core_flops=limits["flops"]["bfloat16"] / threads,
                socket_bytes=reads[max(reads)],
                cache_bytes=reads[min(reads)] / threads,
            ),
            {kind: parts[kind]["seconds"] for kind in NOTEBOOK[1].kinds},
            sum(
                parts[name]["seconds"]
                for name in ("sampling", "rest", "scheduling", "messages")
                if name in parts
            ),
        )
    return found


def measure(most: int, barrier: Barrier) -> None:
    """Compile and run barriers.cpp, and print its figures beside those of the model."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "barriers"
        source = Path(__file__).with_suffix(".cpp")
        flags = ["-std=c++17", "-O2", "-fopenmp", "-I", str(KERNELS)]
        subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True)
        out = subprocess.run([program, str(most)], check=True, capture_output=True, text=True)
    first, *lines = out.stdout.splitlines()
    print(f"a cache line to another core: {float(first) / 2:.0f} ns")
    for line in lines:
        threads, cost = map(int, line.split())
        expected = empty_loop(threads, barrier) * 1e9
        print(f"a loop on {threads} threads: {cost:,} ns, by the model {expected:,.0f}")


def report(shape: Shape, rows: int, times: Times, target: Machine, barrier: Barrier) -> None:
    factor = factors(times, DEFAULT_MODEL, rows, barrier)
    print(f"\n{shape.name}, batch {rows}\n")
    print("| threads | step ms | tok/s | speed-up | efficiency | in barriers | with a tree, ms |")
    print("|---|---|---|---|---|---|---|")
    first = step(shape, rows, 1, target, barrier, factor, times.outside)
    for threads in THREADS:
        today, free, tree = (
            step(shape, rows, threads, target, how, factor, times.outside)
            for how in (barrier, FREE, replace(barrier, tree=True))
        )
        print(
            f"| {threads} | {today * 1e3:.2f} | {rows / today:,.0f} | {first / today:.1f}"
            f" | {first / today / threads:.0%} | {1 - free / today:.0%} | {tree * 1e3:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--breakdown", type=Path, help="file of one-batch --breakdown")
    parser.add_argument("--measure", action="store_true", help="measure what a loop costs here")
    parser.add_argument(
        "--near-ns", type=float, default=37, help="time of a cache line within a chiplet"
    )
    parser.add_argument(
        "--far-ns", type=float, default=156, help="time of a cache line between chiplets"
    )
    parser.add_argument("--socket-gbps", type=float, default=230, help="memory of all cores, GB/s")
    arguments = parser.parse_args()
    print(environment())
    barrier = Barrier(arguments.near_ns / 1e9, arguments.far_ns / 1e9, OWN_S)
    if arguments.measure:
        measure(os.cpu_count() or 1, barrier)
        return
    measured = NOTEBOOK if arguments.breakdown is None else read_times(arguments.breakdown)
    print(
        f"SIMULATED: a socket with {arguments.socket_gbps:g} GB/s, a cache line in"
        f" {barrier.near_s * 1e9:.0f} ns on a chiplet and {barrier.far_s * 1e9:.0f} ns beyond"
    )
    for shape in (DEFAULT_MODEL, ONE_BILLION):
        for rows, times in measured.items():
            target = replace(times.machine, socket_bytes=arguments.socket_gbps * 1e9)
            report(shape, rows, times, target, barrier)


if __name__ == "__main__":
    main()
