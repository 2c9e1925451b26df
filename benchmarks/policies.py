"""Waiting-queue policies on requests that share prefixes, with a cache too small for all of them:
prefix hits and throughput over HTTP.

    python benchmarks/policies.py  # lpm against fcfs, three repetitions, two minutes
    python benchmarks/policies.py --policies fcfs,lpm,hrrn --reps 5

Requests come in groups, each with a prefix of its own. All arrive at once and mixed, and the KV
pool holds the prefixes of two groups: if they are served in order of arrival, most requests find
that others have evicted their prefix. There is one server per policy, with the default model and
the same requests; servers take turns within each repetition, and only one works at a time. Prompts
are new in every repetition. If a request fails or yields another number of tokens, the figures are
not used and the exit code is 1. With --name, JSON goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from contenders import SetpointServer
from machine import environment
from report import HITS, OUTPUT, Aim, Report, Results
from serving import NUM_THREADS, PACKAGES, keep, measure_workload
from workloads import GROUPS, QUICK_GROUPS, Workload

FCFS, LPM = "fcfs", "lpm"
POOL_SEQUENCES = 2.5
"""Size of the KV pool, in whole sequences of the workload."""
AIMS = (Aim(GROUPS.name, HITS, LPM, FCFS, 2.0), Aim(GROUPS.name, OUTPUT, LPM, FCFS, 1.5))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--policies",
        default=f"{FCFS},{LPM}",
        help="what --schedule-policy takes, the base of the comparison first",
    )
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        help="seconds per sample to wait for a quiet machine, and to try again",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny workload, one repetition: does everything work?",
    )
    parser.add_argument(
        "--model-path", help="what `setpoint serve --model-path` takes; default: the default model"
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


async def measure(
    args: argparse.Namespace, policies: Sequence[str], workload: Workload, results: Results
) -> None:
    """Add the samples to ``results`` one by one."""
    pool_tokens = int(
        POOL_SEQUENCES * (workload.shared_tokens + workload.own_tokens + workload.output_tokens)
    )
    common = [
        "--dtype",
        "bfloat16",
        "--num-threads",
        str(NUM_THREADS),
        "--max-total-tokens",
        str(pool_tokens),
        "--enable-cache-report",
    ]
    if args.model_path is not None:
        common += ["--model-path", args.model_path]
    with ExitStack() as stack:
        servers = []
        for policy in policies:
            servers.append(
                SetpointServer(
                    policy, [*common, "--schedule-policy", policy], environment={}, stream=False
                )
            )
            stack.callback(servers[-1].close)
        for server in servers:
            await server.ready()
        await measure_workload(workload, servers, args, results)


def main() -> int:
    args = parse()
    if args.quick:
        args.reps = 1
    policies, workload = args.policies.split(","), QUICK_GROUPS if args.quick else GROUPS
    load = os.getloadavg()[0]
    print(f"{environment(*PACKAGES)}; load average before: {load:.2f}\n", flush=True)
    results: Results = {workload.name: {}}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    whole = True
    try:
        asyncio.run(measure(args, policies, workload, results))
    except KeyboardInterrupt:
        print("Interrupted: only what was measured until then follows.", file=sys.stderr)
        whole = False
    report = Report([workload], results)
    judged = [] if args.quick else report.judge(AIMS)
    print("\n\n".join([report.table(policies[0]), report.cpu_table(), *judged]))
    if args.name is not None:
        print(f"\nwritten: {keep(args, [workload], results, judged, load)}")
    errors = [
        (who, error)
        for who, samples in results[workload.name].items()
        for one in samples
        for error in one.errors
    ]
    for who, error in errors[:10]:
        print(f"FAILED {who}: {error}", file=sys.stderr)
    return 0 if whole and not errors else 1


if __name__ == "__main__":
    sys.exit(main())
