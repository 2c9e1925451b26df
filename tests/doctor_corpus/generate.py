"""Writes the corpus: ``python tests/doctor_corpus/generate.py [NAME …]``. Everything follows from
seeds; the same code writes the same files."""

from __future__ import annotations

import sys
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import evidence
import excerpts
import failures
import regimes_admission
import regimes_alike
import regimes_compute
import regimes_healthy
from cases import Written, is_held_out, save

REGIMES = (
    *regimes_admission.ALL,
    *regimes_compute.ALL,
    *regimes_healthy.ALL,
    *regimes_alike.ALL,
    evidence.simulated,
)


def main(names: list[str]) -> None:
    def is_wanted(name: str) -> bool:
        return not names or any(name.startswith(begin) for begin in names)

    simulated = [case for regime in REGIMES for case in regime() if is_wanted(case.name)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for written, how in pool.map(_simulate, (case.name for case in simulated)):
            _save(written, how)
    for failing in failures.ALL:
        for failure in failing():
            if is_wanted(failure.name):
                _save(failure.write(seed_of(failure.name)), "a failure")
    for each in (*evidence.written(), *excerpts.ALL):
        if is_wanted(each.name):
            _save(each, each.source)


def _simulate(name: str) -> tuple[Written, str]:
    """Cases hold functions, which cannot be sent to another process: it finds them by name."""
    (case,) = (case for regime in REGIMES for case in regime() if case.name == name)
    began = time.perf_counter()
    written, truth = case.write(seed_of(name))
    took = time.perf_counter() - began
    return written, f"{truth.num_steps} steps in {took:.1f} s. {truth.words()}"


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode()) % 100000


def _save(case: Written, how: str) -> None:
    save(case)
    held = " (held out)" if is_held_out(case.name) else ""
    num_lines = case.text.count(b"\n")
    print(f"{case.label.cause:20} {case.name}{held}: {num_lines} lines, {how}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
