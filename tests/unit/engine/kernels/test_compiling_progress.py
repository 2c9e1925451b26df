"""The progress of compiling counts the files that are done, in the order in which they end."""

from __future__ import annotations

import stat
from pathlib import Path

from setpoint.core.progress import reported_to
from setpoint.engine.kernels.cpu import build

COMPILER = """#!/bin/bash
# Compiles nothing. The first file waits for all the others.
for word in "$@"; do
    case "$word" in
        -shared) touch "$3"; exit ;;
        */{first}.o) while [ $(ls "$(dirname "$word")" | wc -l) -lt {others} ]; do sleep 0.05; done ;;
    esac
    last="$built"; built="$word"
    [ "$last" = -o ] && touch "$word"
done
exit 0
"""


def test_a_file_that_takes_long_holds_up_no_count(tmp_path: Path) -> None:
    """Red before: "0 of 18" until the first file had ended, and never 18."""
    files = sorted(build.SOURCE_DIR.glob("*.cpp"))
    compiler = tmp_path / "compiler"
    compiler.write_text(
        COMPILER.replace("{first}", files[0].stem).replace("{others}", str(len(files) - 1))
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    told: list[str] = []
    with reported_to(told.append):
        build.compile_library(str(compiler), "scalar", tmp_path / "made" / "x.so")
    counts = [int(each.split(" of ")[0].split()[-1]) for each in told]
    assert counts == list(range(len(files) + 1))
    assert (tmp_path / "made" / "x.so").exists()
