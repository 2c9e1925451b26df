"""Which names the regular expressions of a folder match. A folder is a stranger's, and Python takes
exponential time for some expressions, where nothing can interrupt it. So they are tried in a
process of their own, with limits that the kernel enforces.

This file is also the program of that process, which starts in hundredths of a second because it
imports nothing but Python's own modules.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence

CPU_SECONDS = 0.8
"""CPU time for one expression; 70,000 names take a tenth of a second."""
ALL_CPU_SECONDS = 10
"""CPU time for all expressions of a folder."""
MEMORY_BYTES = 512 << 20
"""Limit of the address space."""
TOO_MUCH = (
    f"takes more than {CPU_SECONDS:g} s of CPU time ({ALL_CPU_SECONDS} s with those before it) or"
    f" {MEMORY_BYTES >> 20} MiB of memory"
)


def newly_matched(expressions: Sequence[str], names: Sequence[str]) -> list[list[str] | str]:
    """For each expression the names that it matches, from their beginning, and no earlier one does;
    or why it cannot be used. What follows the first such reason means nothing."""
    if not expressions:
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", __file__],
            input=json.dumps([expressions, names]).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except OSError as error:
        return [f"cannot be tried, because no process can be started: {error.strerror}"]
    whole_lines = done.stdout.split(b"\n")[:-1]
    return [*map(json.loads, whole_lines), TOO_MUCH][: len(expressions)]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (ALL_CPU_SECONDS, ALL_CPU_SECONDS))
    expressions, names = json.load(sys.stdin.buffer)
    for expression in expressions:
        # SIGPROF is not handled, so it ends the process.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            match = re.compile(expression).match
        except (re.error, OverflowError, RecursionError) as error:
            print(json.dumps(f"is invalid: {error}"))
            return
        found = [name for name in names if match(name)]
        print(json.dumps(found), flush=True)
        taken = set(found)
        names = [name for name in names if name not in taken]


if __name__ == "__main__":
    main()
