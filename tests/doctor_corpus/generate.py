"""Writes the corpus: ``python tests/doctor_corpus/generate.py [NAME …]``. Everything follows from
seeds; the same code writes the same files."""

from __future__ import annotations

import sys
import time
import zlib

import regimes_admission
import regimes_compute
import regimes_healthy
from cases import is_held_out, save

REGIMES = (*regimes_admission.ALL, *regimes_compute.ALL, *regimes_healthy.ALL)


def main(names: list[str]) -> None:
    for regime in REGIMES:
        for case in regime():
            if names and not any(case.name.startswith(name) for name in names):
                continue
            began = time.perf_counter()
            written, truth = case.write(zlib.crc32(case.name.encode()) % 100000)
            save(written)
            took = time.perf_counter() - began
            num_lines = written.text.count(b"\n")
            held = " (held out)" if is_held_out(case.name) else ""
            print(
                f"{case.label.cause:16} {case.name}{held}: {num_lines} lines, {truth.num_steps}"
                f" steps in {took:.1f} s. {truth.words()}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
