"""What a decode step would take on more cores than were at hand: a simulation, not a measurement.

    python benchmarks/barriers.py [--socket-gbps 230] [--near-ns 37] [--far-ns 156]
    python benchmarks/barriers.py --ranks [--socket-ns 156] [--link-gbps 50]    # several sockets
    python benchmarks/barriers.py --measure    # the costs of a loop and of a gather here

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

With --ranks: a rank on each of several sockets with 32 cores, each with the outputs that a rank
computes (``setpoint.engine.parallel.group.spans``), and a gather after each kernel whose outputs
are divided (gathers.py). The ranks wait for the slowest of them in every gather.

Assumed, because it could not be measured: the memory's rate of a socket (three quarters of eight
channels of DDR5-4800), that the slower of two measured ways of a cache line is the one between
chiplets and between sockets, that all cores keep the clock of two, and for another model the
factors of this one. Not simulated: caches that hold a whole small model, matrix tiles, ranks that
are delayed by anything but their work.
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

from gathers import Between, Gather, Measured
from gathers import measure as measured_gathers
from machine import environment
from team_loop import FREE, OWN_S, Barrier, Machine, empty_loop, even, loop

from setpoint.engine.parallel.group import UNIT, head_spans, spans

THREADS = (1, 2, 4, 8, 16, 32, 64)
BATCHES = (1, 64)
SOCKETS = (1, 2, 3, 4, 6, 8)
SOCKET_CORES = 32
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

    def divides_among(self, ranks: int) -> bool:
        """Whether this number of ranks can divide the model; the rule is that of
        ``ModelSpec.rank_counts``."""
        return ranks <= self.kv_heads or (ranks % self.kv_heads == 0 and ranks <= self.heads)


DEFAULT_MODEL = Shape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152)
ONE_BILLION = Shape("the shape of Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128256)
EIGHT_BILLION = Shape("the shape of Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256)


@dataclass(frozen=True)
class Part:
    """The outputs that a rank computes."""

    heads: int
    kv_heads: int
    hidden: int
    inner: int
    vocab: int


def parts(shape: Shape, ranks: int) -> list[Part]:
    """The part of each rank, as the layers are divided (``split`` of each)."""
    hidden, inner, vocab = (
        [end - begin for begin, end in spans(size, ranks, unit=UNIT)]
        for size in (shape.hidden, shape.inner, shape.vocab)
    )
    return [
        Part(q[1] - q[0], kv[1] - kv[0], *sizes)
        for (q, kv), *sizes in zip(
            head_spans(shape.heads, shape.kv_heads, ranks), hidden, inner, vocab, strict=True
        )
    ]


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


GATHER = Gather(
    [
        Measured(1, 1152, 0.467e-6, 0.503e-6),
        Measured(1, 3072, 0.66e-6, 0.829e-6),
        Measured(1, 4096, 0.855e-6, 1.091e-6),
        Measured(1, 8192, 1.484e-6, 2.103e-6),
        Measured(1, 16384, 4.282e-6, 4.62e-6),
        Measured(1, 28672, 7.612e-6, 7.934e-6),
        Measured(1, 98304, 24.655e-6, 26.154e-6),
        Measured(1, 256512, 60.15e-6, 68.21e-6),
        Measured(64, 1152, 19.563e-6, 20.583e-6),
        Measured(64, 3072, 51.241e-6, 53.629e-6),
        Measured(64, 4096, 65.167e-6, 68.534e-6),
        Measured(64, 8192, 80.394e-6, 135.094e-6),
        Measured(64, 16384, 227.755e-6, 265.008e-6),
        Measured(64, 28672, 293.836e-6, 465.61e-6),
        Measured(64, 98304, 900.73e-6, 3578.66e-6),
    ],
    155e-9,
)
"""Gathers of a step of the three models. docs/notebook.md, "what a gather costs, and a rank on each
socket on paper", in the slower state of the machine."""


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


def kernels(
    shape: Shape, rows: int, threads: int, context: int = CONTEXT, part: Part | None = None
) -> list[Kernel]:
    """The kernels of a captured decode step. part: of one rank; None: there is no other."""
    (part,) = parts(shape, 1) if part is None else (part,)
    q, kv = part.heads * shape.head_dim, part.kv_heads * shape.head_dim
    products = [
        ("linear", shape.layers, q + 2 * kv, shape.hidden),
        ("linear", shape.layers, part.hidden, shape.heads * shape.head_dim),
        ("linear", shape.layers, 2 * part.inner, shape.hidden),
        ("linear", shape.layers, part.hidden, shape.inner),
        ("head", 1, part.vocab, shape.hidden),
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
            attention_units(
                replace(shape, heads=part.heads, kv_heads=part.kv_heads), rows, context, threads
            ),
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


def gathers(shape: Shape) -> list[tuple[int, int]]:
    """How often a step gathers outputs, and the bytes of a row of them."""
    q = shape.heads * shape.head_dim
    return [
        (1 + 2 * shape.layers, shape.hidden * BF16),  # embedding; outputs of either branch
        (shape.layers, q * BF16),
        (shape.layers, shape.inner * BF16),
        (1, shape.vocab * BF16),
    ]


def rank_step(
    shape: Shape,
    rows: int,
    ranks: int,
    machine: Machine,
    between: Between,
    factor: Mapping[str, float],
    outside: float,
) -> tuple[float, float]:
    """The seconds of one decode step on several ranks, and those of its gathers. machine: of each
    rank. The ranks wait for the slowest in each kernel, because its outputs are gathered."""
    of_ranks = [kernels(shape, rows, between.threads, part=part) for part in parts(shape, ranks)]
    computing = sum(
        max(
            each.seconds(between.threads, machine, between.barrier, factor[each.kind])
            for each in kernel
        )
        for kernel in zip(*of_ranks, strict=True)
    )
    gathering = 0.0
    if ranks > 1:
        gathering = sum(
            calls * GATHER.seconds(rows, size, ranks, between) for calls, size in gathers(shape)
        )
    return outside + computing + gathering, gathering


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
    if most > 1:
        report_gathers(measured_gathers([(each.rows, each.row_bytes) for each in GATHER.measured]))


def report_gathers(here: Gather) -> None:
    """Print the sizes of GATHER as measured, beside those of the notebook at this machine's
    time of a cache line."""
    print(f"\nbetween two processes: a cache line in {here.line_s * 1e9:.1f} ns; a gather in µs\n")
    alone = Between(here.line_s, math.inf, 1, FREE)
    print("| rows | bytes of a row | least | median | by the notebook |")
    print("|---|---|---|---|---|")
    for each in here.measured:
        expected = GATHER.seconds(each.rows, each.row_bytes, 2, alone)
        print(
            f"| {each.rows} | {each.row_bytes:,} | {each.least_s * 1e6:.2f}"
            f" | {each.median_s * 1e6:.2f} | {expected * 1e6:.2f} |"
        )


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


def report_ranks(shape: Shape, rows: int, times: Times, target: Machine, between: Between) -> None:
    factor = factors(times, DEFAULT_MODEL, rows, between.barrier)
    print(f"\n{shape.name}, batch {rows}, {between.threads} threads on each socket: PREDICTED\n")
    print("| sockets | step ms | tok/s | speed-up | in gathers |")
    print("|---|---|---|---|---|")
    first, _ = rank_step(shape, rows, 1, target, between, factor, times.outside)
    for ranks in filter(shape.divides_among, SOCKETS):
        seconds, gathering = rank_step(shape, rows, ranks, target, between, factor, times.outside)
        print(
            f"| {ranks} | {seconds * 1e3:.2f} | {rows / seconds:,.0f} | {first / seconds:.2f}"
            f" | {gathering / seconds:.0%} |"
        )


def report_here(rows: int, times: Times, barrier: Barrier) -> None:
    """Print what two ranks of one thread take where ``times`` were measured, beside one process
    with two threads: a prediction that can be checked."""
    factor = factors(times, DEFAULT_MODEL, rows, barrier)
    one = step(DEFAULT_MODEL, rows, 2, times.machine, barrier, factor, times.outside)
    rate = times.machine.read_bytes(2)
    half = replace(times.machine, core_bytes=rate, socket_bytes=rate)
    for line_s in (barrier.near_s, barrier.far_s):
        between = Between(line_s, math.inf, 1, barrier)
        two, gathering = rank_step(DEFAULT_MODEL, rows, 2, half, between, factor, times.outside)
        print(
            f"{DEFAULT_MODEL.name}, batch {rows}, two cores of one socket, a cache line in"
            f" {line_s * 1e9:.0f} ns: {one * 1e3:.2f} ms with two threads, {two * 1e3:.2f} ms with"
            f" two ranks of one ({one / two:.2f} of the speed), gathers {gathering * 1e3:.2f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--breakdown", type=Path, help="file of one-batch --breakdown")
    parser.add_argument(
        "--measure", action="store_true", help="measure what a loop and a gather cost here"
    )
    parser.add_argument("--ranks", action="store_true", help="simulate a rank on each socket")
    parser.add_argument(
        "--near-ns", type=float, default=37, help="time of a cache line within a chiplet"
    )
    parser.add_argument(
        "--far-ns", type=float, default=156, help="time of a cache line between chiplets"
    )
    parser.add_argument(
        "--socket-ns", type=float, help="time of a cache line between sockets; default: --far-ns"
    )
    parser.add_argument(
        "--link-gbps", type=float, default=50, help="what a socket reads from the others, GB/s"
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
    line_s = (arguments.socket_ns or arguments.far_ns) / 1e9
    between = Between(line_s, arguments.link_gbps * 1e9, SOCKET_CORES, barrier)
    if arguments.ranks:
        print(
            "PREDICTED, never measured: a rank on each socket, a cache line between sockets in"
            f" {line_s * 1e9:.0f} ns, {arguments.link_gbps:g} GB/s from the other sockets"
        )
        for rows, times in measured.items():
            report_here(rows, times, barrier)
    for rows, times in measured.items():
        target = replace(times.machine, socket_bytes=arguments.socket_gbps * 1e9)
        if arguments.ranks:
            for shape in (DEFAULT_MODEL, ONE_BILLION, EIGHT_BILLION):
                report_ranks(shape, rows, times, target, between)
        else:
            for shape in (DEFAULT_MODEL, ONE_BILLION):
                report(shape, rows, times, target, barrier)


if __name__ == "__main__":
    main()
