"""Which names the regular expressions of a folder match. A folder is a stranger's, and Python takes
exponential time for some expressions, where nothing can interrupt it. So they are tried in a
process of their own, with limits that the kernel enforces.

This file is also the program of that process, which starts in hundredths of a second because it
imports nothing but Python's own modules.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import closing

from setpoint.sandbox.child import ChildLostError, LimitedChild, TooMuchError
from setpoint.sandbox.process_limits import ProcessLimits
from setpoint.sandbox.worker import serve

_MODULE = "setpoint.checkpoint.folder.matching_names"
LIMITS = ProcessLimits(cpu_s=0.8, memory_bytes=512 << 20)
"""CPU time for one expression; 70,000 names take a tenth of a second."""
ALL_CPU_SECONDS = 10
"""CPU time for all expressions of a folder."""
TOO_MUCH = (
    f"takes more than {LIMITS.cpu_s:g} s of CPU time ({ALL_CPU_SECONDS} s with those before it) or"
    f" {LIMITS.memory_bytes >> 20} MiB of memory"
)


def newly_matched(expressions: Sequence[str], names: Sequence[str]) -> list[list[str] | str]:
    """For each expression the names that it matches, from their beginning, and no earlier one does;
    or why it cannot be used, which ends the list."""
    found: list[list[str] | str] = []
    taken: set[str] = set()
    spent_s = 0.0
    opening = json.dumps(list(names)).encode()
    with closing(LimitedChild(_MODULE, LIMITS, opening=opening)) as child:
        for expression in expressions:
            if spent_s > ALL_CPU_SECONDS:
                return [*found, TOO_MUCH]
            try:
                answer = json.loads(child.ask(expression.encode(errors="surrogatepass")))
            except TooMuchError:
                return [*found, TOO_MUCH]
            except ChildLostError as error:
                return [*found, f"cannot be tried, because the process that tries it {error}"]
            if isinstance(answer, str):
                return [*found, answer]
            matched, seconds = answer
            # A child that has replaced another one does not know what that one had found.
            found.append([name for name in matched if name not in taken])
            taken.update(matched)
            spent_s += seconds
    return found


class _Names:
    """The names that no expression has matched."""

    def __init__(self) -> None:
        self._left: list[str] | None = None

    def answer(self, job: bytes) -> bytes:
        """The names that an expression matches and the CPU time it took, or why it cannot be used.
        The first job is the names."""
        if self._left is None:
            self._left = json.loads(job)
            return b""
        began = time.process_time()
        try:
            match = re.compile(job.decode(errors="surrogatepass")).match
        except (re.error, OverflowError, RecursionError) as error:
            return json.dumps(f"is invalid: {error}").encode()
        found = [name for name in self._left if match(name)]
        taken = set(found)
        self._left = [name for name in self._left if name not in taken]
        return json.dumps([found, time.process_time() - began]).encode()


if __name__ == "__main__":
    serve(_Names().answer, LIMITS)
