"""Setpoint compared with llama.cpp's server, vLLM's CPU build, OpenVINO GenAI and transformers, in
one run, on the workloads W1-W4 of benchmarks/workloads.py.

    python benchmarks/peers/install.py  # once
    python benchmarks/compare.py --name peers  # three repetitions: an hour and a half
    python benchmarks/compare.py --only W1,W2 --contenders "llama.cpp BF16,vLLM" --reps 5
    python benchmarks/compare.py --variant "setpoint int8=--quantization w8a8_int8"
    python benchmarks/compare.py --contenders 512 --variant "512=--chunked-prefill-size 512"
    python benchmarks/compare.py --shape llama-3.2-1b  # made by benchmarks/shapes.py

Every engine serves the same weights with the same number of threads, to the same client on the same
machine. A turn is a fresh process, alone on the machine: it starts, warms up and is measured on
each workload, and ends. Setpoint has a turn before every peer's, so that a machine that becomes
faster or slower affects both. OpenVINO and transformers are timed without HTTP, in their favour. A
peer that is not installed or does not start is a row with the reason; one with a failed request has
no figure there, and the exit code is 1. Prompts are new in every repetition (W3's prefix is shared
within one); sampling is greedy with ignore_eos. On a machine that others use, too, --patience waits
for quiet moments and repeats disturbed samples. With --name, JSON goes to benchmarks/results/;
benchmarks/chart.py draws it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from contenders import (
    Contender,
    HttpServer,
    Sample,
    SetpointServer,
    StartError,
    free_port,
    parse_variant,
)
from machine import PACKAGES, environment, is_quiet, save, versions
from peer_process import PeerProcess, transformers_peer
from peers.catalog import (
    Copies,
    Peer,
    catalog,
    default_copies,
    installed_versions,
    missing,
    shape_copies,
)
from peers.install import DEFAULT_DIR
from report import DECODE, OUTPUT, PREFILL, TTFT, WALL, Comparison, Metric, Report, Results, number
from workloads import FULL, QUICK, Workload

from setpoint.checkpoint.source import locate
from setpoint_testing.whole_checkpoint import write_whole

OURS = "setpoint"
NUM_THREADS = 2
WARM_UP_TOKENS = 4
DISTURBED = 0.05
"""Share of the machine's CPU time used by others from which a sample is repeated, as long as
--patience lasts."""
ATTEMPT = 1000
"""Attempt k of repetition r takes the prompts of repetition r + k * ATTEMPT."""
COLUMNS: Sequence[tuple[str, Metric]] = (
    ("W1", TTFT),
    ("W1", DECODE),
    ("W2", OUTPUT),
    ("W3", WALL),
    ("W4", PREFILL),
)


@dataclass(slots=True, frozen=True)
class Entrant:
    name: str
    precision: str
    """Empty if the flags determine it."""
    start: Callable[[], Contender]
    """Starts a fresh process. Raises StartError."""
    description: dict[str, object] = field(default_factory=dict)
    """How it is started, for the result file."""


@dataclass(slots=True)
class Run:
    """The results of a comparison so far; each turn adds its own."""

    results: Results
    start_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds from the start of the process until it was ready, by contender."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Contender -> why it has no turns, or no more."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="W1,W2,W3,W4", help="workloads, e.g. W1,W2")
    parser.add_argument("--contenders", help="peers and variants, comma-separated; default: all")
    parser.add_argument(
        "--shape",
        help="random weights of this shape, e.g. llama-3.2-1b, instead of the default model",
    )
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument(
        "--server-args",
        default="",
        help="further arguments for every Setpoint server, in one string",
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        help="NAME=[ENV=VALUE …] [--flag value …]: one more Setpoint server",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        help="seconds per sample to wait for a quiet machine, and to try again",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny workloads, one repetition: does everything work?"
    )
    parser.add_argument(
        "--name",
        help=(
            "keep the figures in benchmarks/results/<date>-<name>.json; without it they are only"
            " printed"
        ),
    )
    parser.add_argument(
        "--peers-dir",
        type=Path,
        default=DEFAULT_DIR,
        help="where benchmarks/peers/install.py put them",
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


def setpoint_entrant(
    name: str, precision: str, model: str, arguments: Sequence[str], environ: dict[str, str]
) -> Entrant:
    whole = [
        "--model-path",
        model,
        "--dtype",
        "bfloat16",
        "--num-threads",
        str(NUM_THREADS),
        *arguments,
    ]
    return Entrant(
        name,
        precision,
        lambda: SetpointServer(name, whole, environment=environ, stream=False),
        {"arguments": whole, "environment": environ},
    )


def peer_entrant(peer: Peer) -> Entrant:
    def start() -> Contender:
        if peer.offline:
            return PeerProcess(peer.name, peer.command(0), environment=peer.environment)
        port = free_port()
        return HttpServer(
            peer.name,
            peer.command(port),
            port=port,
            environment=peer.environment,
            start_timeout_s=peer.start_timeout_s,
            refusal=peer.refusal,
        )

    return Entrant(
        peer.name,
        peer.precision,
        start,
        {"command": peer.command(0), "environment": peer.environment},
    )


def served(args: argparse.Namespace) -> Copies:
    """The model that every engine serves. Raises ValueError for a shape that does not exist."""
    if args.shape is not None:
        copies = shape_copies(args.peers_dir, args.shape)
        if not copies.bf16.exists():
            raise ValueError(
                f"--shape {args.shape}: not there; python benchmarks/shapes.py makes it"
            )
        return copies
    # All use one folder: that of the file from which install.py made the other copies, if it
    # exists.
    packaged = next(iter(sorted((args.peers_dir / "models").glob("*.gguf"))), None)
    source = locate(None if packaged is None else str(packaged), log=print)
    copies = default_copies(args.peers_dir, source.folder)
    if not copies.bf16.exists():
        write_whole(copies.own, copies.bf16)
    return copies


def entrants(args: argparse.Namespace, copies: Copies, run: Run) -> tuple[Entrant, list[Entrant]]:
    """Setpoint, and all other contenders that are asked for and installed; those that are not
    installed are noted in ``run``. Raises ValueError for an unknown name."""
    model = str(copies.own)
    ours = setpoint_entrant(
        OURS, "bf16", model, ["--quantization", "unquant", *shlex.split(args.server_args)], {}
    )
    rivals = []
    for text in args.variant:
        name, arguments, environ = parse_variant(text)
        rivals.append(
            setpoint_entrant(name, "", model, [*shlex.split(args.server_args), *arguments], environ)
        )
    peers = catalog(args.peers_dir, copies, num_threads=NUM_THREADS)
    rivals += [peer_entrant(peer) for peer in peers]
    rivals.append(
        Entrant(
            "transformers",
            "bf16",
            lambda: transformers_peer(str(copies.bf16), num_threads=NUM_THREADS),
        )
    )
    names = [each.name for each in rivals]
    asked = args.contenders.split(",") if args.contenders else names
    if unknown := [name for name in asked if name not in names]:
        raise ValueError(f"--contenders: no {', '.join(unknown)}; there are {', '.join(names)}")
    run.skipped |= {
        peer.name: reason
        for peer in peers
        if peer.name in asked and (reason := missing(peer, args.peers_dir)) is not None
    }
    return ours, [each for each in rivals if each.name in asked and each.name not in run.skipped]


async def compare(
    ours: Entrant,
    rivals: Sequence[Entrant],
    workloads: Sequence[Workload],
    run: Run,
    *,
    reps: int,
    patience_s: float,
) -> None:
    """Measure: ours before each rival, and the rivals in reverse order in every other repetition.
    Within a repetition all get the same prompts."""
    for repetition in range(reps):
        for rival in rivals if repetition % 2 == 0 else reversed(rivals):
            if not {ours.name, rival.name} & run.skipped.keys():
                await turn(ours, workloads, repetition, run, patience_s)
                await turn(rival, workloads, repetition, run, patience_s)
        if not rivals:
            await turn(ours, workloads, repetition, run, patience_s)


def full_warm_up(workload: Workload) -> Workload:
    """All prompts, a few tokens of each answer."""
    return replace(workload, output_tokens=min(WARM_UP_TOKENS, workload.output_tokens))


async def turn(
    entrant: Entrant,
    workloads: Sequence[Workload],
    repetition: int,
    run: Run,
    patience_s: float,
    *,
    warm_up: Callable[[Workload], Workload] = full_warm_up,
    at_end: Callable[[Contender], None] = lambda contender: None,
) -> None:
    """Start a contender, measure it, end it. If it does not start, note it as skipped. warm_up:
    what it serves before a workload. at_end: called before it is ended."""
    began = time.perf_counter()
    contender = None
    try:
        contender = entrant.start()
        await contender.ready()
        run.start_s.setdefault(entrant.name, []).append(time.perf_counter() - began)
        for workload in workloads:
            await contender.run(warm_up(workload), -1)
            sample = await quiet_sample(contender, workload, repetition, patience_s)
            run.results[workload.name].setdefault(entrant.name, []).append(sample)
        at_end(contender)
    except StartError as error:
        print(f"SKIPPED {error}", file=sys.stderr, flush=True)
        run.skipped[entrant.name] = str(error)
    finally:
        if contender is not None:
            contender.close()


async def quiet_sample(
    contender: Contender, workload: Workload, repetition: int, patience_s: float
) -> Sample:
    """A sample that nobody disturbed, or the least disturbed one that came within ``patience_s``
    seconds (the first at once if 0)."""
    deadline, best = time.monotonic() + patience_s, None
    for attempt in itertools.count():
        while time.monotonic() < deadline and not await asyncio.to_thread(is_quiet):
            pass
        # Another attempt is another repetition: its prompts must be fresh too.
        sample = await contender.run(workload, repetition + attempt * ATTEMPT)
        failed = f", {len(sample.errors)} FAILED" if sample.errors else ""
        others = (
            f", others used {sample.foreign_share:.0%} of the machine"
            if sample.foreign_share > DISTURBED
            else ""
        )
        print(
            f"{workload.name} #{repetition} {contender.name}: {sample.wall_s:.2f}"
            f" s{failed}{others}",
            file=sys.stderr,
            flush=True,
        )
        if best is None or sample.foreign_share < best.foreign_share:
            best = sample
        if sample.errors or sample.foreign_share <= DISTURBED or time.monotonic() >= deadline:
            return sample if sample.errors else best
    raise AssertionError("unreachable")


def table(ours: Entrant, rivals: Sequence[Entrant], workloads: Sequence[Workload], run: Run) -> str:
    """The table in Markdown: a row per contender with medians, ranges, and how many times as good
    Setpoint is."""
    report, by_name = (
        Report(workloads, run.results),
        {workload.name: workload for workload in workloads},
    )
    columns = [(by_name[name], metric) for name, metric in COLUMNS if name in by_name]
    heads = [
        "start, s",
        *(f"{workload.name} {metric.name}, {metric.unit}" for workload, metric in columns),
    ]
    lines = [
        "| contender | precision | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 2) + "|",
    ]
    for entrant in (ours, *rivals):
        if entrant.name in run.skipped:
            continue
        cells = (
            [cell(run.start_s[entrant.name], [], higher_is_better=False)]
            if entrant.name in run.start_s
            else ["–"]
        )
        for workload, metric in columns:
            base = report.values(workload, ours.name, metric) if entrant is not ours else []
            failed = [
                error
                for sample in run.results[workload.name].get(entrant.name, [])
                for error in sample.errors
            ]
            values = report.values(workload, entrant.name, metric)
            cells.append(
                f"failed: {one_line(failed[0])}"
                if failed
                else cell(values, base, higher_is_better=metric.higher_is_better)
            )
        lines.append(
            f"| {entrant.name} | {entrant.precision or 'as its flags say'} | "
            + " | ".join(cells)
            + " |"
        )
    for name, reason in run.skipped.items():
        lines.append(f"| {name} | | skipped: {one_line(reason)} |" + " |" * (len(heads) - 1))
    return "\n".join(
        [*lines, "", "Median (lowest – highest) · how many times as good Setpoint is."]
    )


def cell(values: Sequence[float], ours: Sequence[float], *, higher_is_better: bool) -> str:
    if not values:
        return "–"
    spread = f"{number(statistics.median(values))} ({number(min(values))} – {number(max(values))})"
    return f"{spread} · {Comparison(ours, values, higher_is_better)}" if ours else spread


def one_line(reason: str, limit: int = 160) -> str:
    """The reason for a cell of a table: without line ends and bars, and cut in the middle, because
    the end of a log says most."""
    line = " ".join(reason.split()).replace("|", "/")
    return line if len(line) <= limit else f"{line[: limit // 2]} … {line[-limit // 2 :]}"


def keep(
    args: argparse.Namespace,
    everybody: Sequence[Entrant],
    workloads: Sequence[Workload],
    run: Run,
    load: float,
) -> Path:
    figures = {
        "workloads": [asdict(workload) for workload in workloads],
        "contenders": {
            each.name: {"precision": each.precision, **each.description} for each in everybody
        },
        "skipped": run.skipped,
        "start_s": run.start_s,
        "samples": {
            name: {who: [asdict(one) for one in samples] for who, samples in by.items()}
            for name, by in run.results.items()
        },
    }
    return save(
        args.results,
        args.name,
        figures,
        packages=versions(*PACKAGES) | installed_versions(args.peers_dir),
        load=load,
    )


def main() -> int:
    args = parse()
    names = args.only.split(",")
    workloads = [workload for workload in (QUICK if args.quick else FULL) if workload.name in names]
    if not workloads or len(workloads) != len(names):
        raise SystemExit(f"--only {args.only}: workloads are W1, W2, W3, W4")
    load = os.getloadavg()[0]
    run = Run({workload.name: {} for workload in workloads})
    try:
        ours, rivals = entrants(args, served(args), run)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(f"{environment(*PACKAGES)}; load average before: {load:.2f}\n", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    whole = True
    try:
        asyncio.run(
            compare(
                ours,
                rivals,
                workloads,
                run,
                reps=1 if args.quick else args.reps,
                patience_s=args.patience,
            )
        )
    except KeyboardInterrupt:
        print("Interrupted: only what was measured until then follows.", file=sys.stderr)
        whole = False
    print(
        "\n\n".join(
            [table(ours, rivals, workloads, run), Report(workloads, run.results).cpu_table()]
        )
    )
    for name, pin in installed_versions(args.peers_dir).items():
        print(f"{name} {pin}")
    if args.name is not None:
        print(f"\nwritten: {keep(args, [ours, *rivals], workloads, run, load)}")
    failed = any(
        sample.errors
        for by in run.results.values()
        for samples in by.values()
        for sample in samples
    )
    return 0 if whole and not failed and ours.name not in run.skipped else 1


if __name__ == "__main__":
    sys.exit(main())
