"""The progress of compiling counts the files that are done, in the order in which they end."""

from __future__ import annotations

import stat
from pathlib import Path

from setpoint.core.progress import reported_to
from setpoint.engine.kernels.cpu import build

COMPILER = """#!/bin/bash
# Compiles nothing. The first file ends when all the others have been counted, or, as a failure,
# after two minutes.
for word in "$@"; do
    case "$word" in
        -shared) touch "$3"; exit ;;
        */{first}.o)
            for turn in {1..2400}; do [ -e {counted} ] && break; sleep 0.05; done
            [ -e {counted} ] || exit 1 ;;
    esac
    last="$built"; built="$word"
    [ "$last" = -o ] && touch "$word"
done
exit 0
"""


def test_a_file_that_takes_long_holds_up_no_count(tmp_path: Path) -> None:
    """Red before: "0 of 18" until the first file had ended, and never 18."""
    files = sorted(build.SOURCE_DIR.rglob("*.cpp"))
    compiler, counted = tmp_path / "compiler", tmp_path / "counted"
    compiler.write_text(
        COMPILER.replace("{first}", files[0].stem).replace("{counted}", str(counted))
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    counts: list[int] = []

    def tell(line: str) -> None:
        counts.append(int(line.split(" of ")[0].split()[-1]))
        if counts[-1] == len(files) - 1:
            counted.touch()

    with reported_to(tell):
        build.compile_library(str(compiler), "scalar", tmp_path / "made" / "x.so")
    assert counts == list(range(len(files) + 1))
    assert (tmp_path / "made" / "x.so").exists()
