"""Setpoint over HTTP and its peers, in one run: wall times, throughput and latency on four
workloads of random tokens.

    python benchmarks/serving.py  # W1-W4, three repetitions, and transformers
    python benchmarks/serving.py --only W1,W2 --reps 5
    python benchmarks/serving.py --only W2,W4 --no-peer --variant "512=--chunked-prefill-size 512"
    python benchmarks/serving.py --offline  # what HTTP costs: the server and an Engine

Contenders take turns within each repetition, and only one of them works at a time. Prompts are new
in every repetition (W3's prefix is shared within one). Sampling is greedy with ignore_eos, so that
all generate the same number of tokens. A request that fails or yields another number of tokens is
an error: the contender's figures are not reported, and the exit code is 1. A difference counts only
if it is larger than the spread of the repetitions. On a machine that others use, too, --patience
waits for quiet moments and repeats disturbed samples. With --name, JSON goes to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from contenders import Contender, OfflineEngine, Sample, SetpointServer, Streaming, parse_variant
from machine import environment, is_quiet, save, versions
from peer_process import transformers_peer
from report import DECODE, OUTPUT, WALL, Aim, Report, Results
from workloads import FULL, QUICK, Workload

from setpoint.checkpoint.source import locate
from setpoint_testing.whole_checkpoint import write_whole

OURS, PEER, NO_CACHE = "setpoint", "transformers", "setpoint, no radix cache"
STREAMING, OFFLINE = "setpoint, streaming", "setpoint, offline"
PACKAGES = ("setpoint", "torch", "transformers", "aiohttp")
NUM_THREADS = 2
WARM_UP_TOKENS = 4
DISTURBED = 0.05
"""Share of the machine's CPU time used by others from which a sample is repeated, as long as
--patience lasts."""
ATTEMPT = 1000
"""Attempt k of repetition r takes the prompts of repetition r + k * ATTEMPT."""
AIMS = (
    Aim("W1", DECODE, OURS, PEER, 2.0),
    Aim("W2", OUTPUT, OURS, PEER, 2.4),
    Aim("W3", WALL, OURS, NO_CACHE, 5.0),
    *(
        Aim(workload.name, WALL, who, OFFLINE, 0.93)
        for workload in FULL
        for who in (OURS, STREAMING)
    ),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="W1,W2,W3,W4", help="workloads, e.g. W1,W2")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument(
        "--model-path", help="what `setpoint serve --model-path` takes; default: the default model"
    )
    parser.add_argument(
        "--server-args",
        default="",
        help="further arguments for every Setpoint server, in one string",
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        help="NAME=[ENV=VALUE …] [--flag value …]: one more server to compare",
    )
    parser.add_argument(
        "--stream", action="store_true", help="all requests stream (W1 always does)"
    )
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument(
        "--offline",
        action="store_true",
        help="compare only with the Engine without HTTP and the server with streams",
    )
    parser.add_argument(
        "--peer-w3", action="store_true", help="run W3 on transformers too, which takes minutes"
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
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def server_arguments(args: argparse.Namespace) -> list[str]:
    model = [] if args.model_path is None else ["--model-path", args.model_path]
    return [
        *model,
        "--dtype",
        "bfloat16",
        "--num-threads",
        str(NUM_THREADS),
        *shlex.split(args.server_args),
    ]


def server(
    name: str, args: argparse.Namespace, extra: Sequence[str], environ: dict[str, str]
) -> SetpointServer:
    return SetpointServer(
        name, [*server_arguments(args), *extra], environment=environ, stream=args.stream
    )


def takes_part(name: str, workload: Workload, args: argparse.Namespace) -> bool:
    """Without a radix cache only W3 is another workload; a single request always streams; W3 takes
    transformers minutes."""
    if name == NO_CACHE:
        return workload.name == "W3"
    if name == STREAMING:
        return workload.num_requests > 1
    return name != PEER or workload.name != "W3" or args.peer_w3


async def measure(
    args: argparse.Namespace, workloads: Sequence[Workload], results: Results
) -> None:
    """Fills ``results``, sample by sample."""
    with ExitStack() as stack:
        servers = [server(OURS, args, [], {})]
        stack.callback(servers[0].close)
        if not args.offline and any(workload.name == "W3" for workload in workloads):
            servers.append(server(NO_CACHE, args, ["--disable-radix-cache"], {}))
            stack.callback(servers[-1].close)
        for text in args.variant:
            name, extra, environ = parse_variant(text)
            servers.append(server(name, args, extra, environ))
            stack.callback(servers[-1].close)
        contenders: list[Contender] = [*servers]
        if args.offline:
            offline = OfflineEngine(OFFLINE, server_arguments(args))
            stack.callback(offline.close)
            contenders += [Streaming(STREAMING, servers[0]), offline]
        elif not args.no_peer:
            copy = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            whole = write_whole(locate(args.model_path, log=print).folder, copy)
            peer = transformers_peer(str(whole), num_threads=NUM_THREADS)
            stack.callback(peer.close)
            contenders.append(peer)
        for each in contenders:
            await each.ready()
        for workload in workloads:
            present = [
                contender for contender in contenders if takes_part(contender.name, workload, args)
            ]
            await measure_workload(workload, present, args, results)


async def measure_workload(
    workload: Workload, contenders: Sequence[Contender], args: argparse.Namespace, results: Results
) -> None:
    """Warm every contender up, then take turns; the order is reversed in every other repetition."""
    warm_up = replace(workload, output_tokens=min(WARM_UP_TOKENS, workload.output_tokens))
    for contender in contenders:
        await contender.run(warm_up, -1)
        results[workload.name][contender.name] = []
    for repetition in range(args.reps):
        for contender in contenders if repetition % 2 == 0 else reversed(contenders):
            sample = await quiet_sample(contender, workload, repetition, args.patience)
            results[workload.name][contender.name].append(sample)


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


def keep(
    args: argparse.Namespace,
    workloads: Sequence[Workload],
    results: Results,
    judged: Sequence[str],
    load: float,
) -> Path:
    figures = {
        "workloads": [asdict(workload) for workload in workloads],
        "aims": judged,
        "samples": {
            name: {who: [asdict(one) for one in samples] for who, samples in by.items()}
            for name, by in results.items()
        },
    }
    return save(args.results, args.name, figures, packages=versions(*PACKAGES), load=load)


def main() -> int:
    args = parse()
    if args.quick:
        args.reps = 1
    names = args.only.split(",")
    workloads = [workload for workload in (QUICK if args.quick else FULL) if workload.name in names]
    if not workloads or len(workloads) != len(names):
        raise SystemExit(f"--only {args.only}: workloads are W1, W2, W3, W4")
    load = os.getloadavg()[0]
    print(f"{environment(*PACKAGES)}; load average before: {load:.2f}\n", flush=True)
    results: Results = {workload.name: {} for workload in workloads}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    whole = True
    try:
        asyncio.run(measure(args, workloads, results))
    except KeyboardInterrupt:
        print("Interrupted: only what was measured until then follows.", file=sys.stderr)
        whole = False
    report = Report(workloads, results)
    judged = [] if args.quick else report.judge(AIMS)
    print("\n\n".join([report.table(OURS), report.cpu_table(), *judged]))
    if args.name is not None:
        print(f"\nwritten: {keep(args, workloads, results, judged, load)}")
    errors = [
        (w, who, error)
        for w, by in results.items()
        for who, samples in by.items()
        for one in samples
        for error in one.errors
    ]
    for where, who, error in errors[:10]:
        print(f"FAILED {where} {who}: {error}", file=sys.stderr)
    return 0 if whole and not errors else 1


if __name__ == "__main__":
    sys.exit(main())
