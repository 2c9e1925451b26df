"""One part of a measurement on a GPU, in a process that ``run_all.py`` starts and limits.

Whatever runs in it may hang, crash or be killed: what it has found until then is in its file.
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.results import Results

PR_SET_PDEATHSIG = 1
"""See prctl(2)."""
TESTS = Path(__file__).parents[2] / "tests/gpu"
KERNELS = "test_device_kernels.py"


class _Reports:
    """A plugin of pytest: tests become results when they end, with what they have recorded."""

    def __init__(self, out: Results) -> None:
        self._out = out
        self._count = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self._count[report.outcome] += 1
        name = report.nodeid.partition("::")[2]
        for what, value in report.user_properties:
            self._out.add(f"{name}: {what}", float(value))
        if not report.passed:
            why = report.longreprtext.strip().splitlines()
            self._out.add(name, f"{report.outcome}: {why[-1] if why else ''}")
        for outcome, count in self._count.items():
            self._out.add(f"tests that {outcome}", count)


def tested(out: Results, *arguments: str) -> None:
    """Run tests that need a GPU."""
    options = ["-q", "-m", "gpu and not full", "--rootdir", str(TESTS.parents[1])]
    code = pytest.main([*options, *arguments], plugins=[_Reports(out)])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), code


def _work(name: str) -> Callable[[Results], None]:
    """What a part does. Only its own modules are imported: they start an engine, or Triton."""
    if name == "kernels":
        return lambda out: tested(out, str(TESTS / KERNELS))
    if name == "goldens":
        return lambda out: tested(out, str(TESTS), f"--ignore={TESTS / KERNELS}")
    if name in ("rates", "sweeps"):
        from gpu import rates, sweeps

        return {"rates": rates.rates, "sweeps": sweeps.sweeps}[name]
    from gpu import steps, throughput

    return {
        "steps": steps.steps,
        "mixtures": steps.mixtures,
        "offline": throughput.offline,
        "many-rows": throughput.many_rows,
    }[name]


def _count_hits() -> list[bool]:
    """Gets an entry for each kernel that Triton makes ready from now on: was it in its cache?"""
    found: list[bool] = []

    def listen(*, cache_hit: bool, **rest: Any) -> None:
        found.append(cache_hit)

    import triton

    triton.knobs.compilation.listener = listen
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    out = Results(args.out, args.name, rehearsal=args.rehearse)
    if args.rehearse:
        import setpoint_testing.interpreted_triton  # noqa: F401 - mends Triton's interpreter
    elif not torch.cuda.is_available():
        sys.exit("torch cannot use a GPU here")
    hits = _count_hits()
    _work(args.name)(out)
    out.end(cache_hits=sum(hits))


if __name__ == "__main__":
    main()
