"""``python -m setpoint_testing.simulation --seed 123 -v``: run seeds; the trace of one with ``-v``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from setpoint_testing.simulation.operator_run import simulate_operators
from setpoint_testing.simulation.run import simulate
from setpoint_testing.simulation.tier_run import simulate_tiers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m setpoint_testing.simulation")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds, one after the other")
    parser.add_argument("--tiers", action="store_true", help="servers with cache tiers")
    parser.add_argument("--operators", action="store_true", help="orders of all kinds")
    parser.add_argument("-v", action="store_true", help="print everything that happens")
    arguments = parser.parse_args()
    simulate_kind = simulate
    if arguments.tiers:
        simulate_kind = simulate_tiers
    elif arguments.operators:
        simulate_kind = simulate_operators
    seen: Counter[str] = Counter()
    failed = []
    began = time.process_time()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        report = simulate_kind(seed)
        seen.update(report.seen)
        if arguments.v:
            sys.stdout.write(report.world.trace())
        if report.wrong:
            failed.append(seed)
            print(f"seed {seed}:", *report.wrong, sep="\n  ")
    seconds = time.process_time() - began
    happened = ", ".join(f"{count} {what}" for what, count in seen.most_common())
    print(f"{arguments.count} seeds, {len(failed)} wrong: {happened}")
    print(f"{seconds:.1f} s of CPU time", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
