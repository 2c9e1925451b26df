"""How fast keys and values move from one process to another: through shared memory and over
loopback TCP, with and without checksums, from the pool of one to the pool of the other.

    python benchmarks/handover.py [--tokens 4096] [--times 8]

A token takes 23,040 bytes, as SmolLM2-135M's do in bf16. The rate counts from the first row that is
read to the word that the last one is written. Aims: 3 GB/s through shared memory, 1 GB/s over TCP.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

import numpy as np
from machine import environment

from setpoint.core.handover import Arrived, Given, Wanted
from setpoint.core.rooms import Bootstrap
from setpoint_testing.handovers import HOST, handed, pair

ROW_BYTES = 23_040
DIGEST = bytes(32)
AIMS = {"shared": 3.0, "tcp": 1.0}


def give(how: str, checksums: bool, tokens: int, times: int) -> None:
    """The prefill side, in a process of its own."""
    rows = np.arange(1, tokens + 1, dtype=np.int32)
    with pair(
        num_pages=tokens, row_bytes=ROW_BYTES, share=how == "shared", checksums=checksums
    ) as both:
        for number in range(times):
            both.giver.offer(number, number, DIGEST)
        print(both.port, flush=True)
        for number in range(times):
            both.given.wait(Wanted, number)
            both.giver.supply(number, rows, handed(tokens))
            assert not both.given.wait(Given, number, 120.0).failure
        sys.stdin.readline()


def rates(how: str, checksums: bool, tokens: int, times: int) -> list[float]:
    """GB/s of each transfer but the first, which touches the memory."""
    command = [sys.executable, __file__, "--give", how, "--tokens", str(tokens)]
    command += ["--times", str(times), *(["--checksums"] if checksums else [])]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdin is not None
    try:
        port = int(child.stdout.readline())
        rows = np.arange(1, tokens + 1, dtype=np.int32)
        with pair(
            num_pages=tokens, row_bytes=ROW_BYTES, share=how == "shared", checksums=checksums
        ) as own:
            found = []
            for number in range(times):
                own.taker.fetch(number, Bootstrap(number, HOST, port), DIGEST, 0, rows)
                arrived = own.taken.wait(Arrived, number, 120.0)
                assert not arrived.failure, arrived.failure
                found.append(arrived.num_bytes / arrived.seconds / 1e9)
    finally:
        child.stdin.close()
        child.wait()
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--give", choices=tuple(AIMS), help=argparse.SUPPRESS)
    parser.add_argument("--checksums", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.give:
        give(arguments.give, arguments.checksums, arguments.tokens, arguments.times)
        return
    print(environment())
    print(f"{arguments.tokens} tokens, {arguments.tokens * ROW_BYTES / 1e6:.0f} MB per transfer")
    for how, aim in AIMS.items():
        for checksums in (False, True):
            found = rates(how, checksums, arguments.tokens, arguments.times)
            print(
                f"{how:7} {'with' if checksums else 'without'} checksums: median"
                f" {statistics.median(found):5.2f} GB/s, {min(found):5.2f} to {max(found):5.2f}"
                f" (aim {aim:.0f})"
            )


if __name__ == "__main__":
    main()
