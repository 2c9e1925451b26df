"""The progress of compiling counts the files that are done, in the order in which they end. A build
that was killed leaves its finished files to the next one."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def test_a_file_that_takes_long_holds_up_no_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: "0 of 18" until the first file had ended, and never 18."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
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


COUNTS = """#!/bin/bash
# Notes how many calls there are at a time.
touch {running}/$$
ls {running} | wc -l >>{counts}
sleep 0.2
rm {running}/$$
last=""
for word in "$@"; do
    [ "$last" = -o ] && touch "$word"
    last="$word"
done
exit 0
"""


@pytest.mark.parametrize("num_cores", [1, 3])
def test_as_many_files_as_cores_are_compiled_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cores: int
) -> None:
    """Red before: all at once, with the memory of all."""
    running, counts, compiler = tmp_path / "running", tmp_path / "counts", tmp_path / "compiler"
    running.mkdir()
    compiler.write_text(COUNTS.replace("{running}", str(running)).replace("{counts}", str(counts)))
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    build.compile_library(str(compiler), "scalar", tmp_path / "made" / "x.so")
    assert max(map(int, counts.read_text().split())) == num_cores


HANGS = """#!/bin/bash
# The first two files are compiled, or all of them if the file "quick" is there. Each call is noted.
case "$*" in
    --version) echo 1; exit ;;
    -shared*) touch "$3"; exit ;;
esac
while [ "$1" != -o ]; do shift; done
echo "$2" >>{calls}
case "$2" in
    */{one}.o|*/{two}.o) ;;
    *) [ -e {quick} ] || exec sleep 600 ;;
esac
touch "$2"
"""


def test_a_build_that_was_killed_leaves_its_files_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: the next build began at 0 of 18, and the folder of the first one stayed."""
    one, two, *rest = (each.stem for each in sorted(build.SOURCE_DIR.rglob("*.cpp")))
    calls, quick, compiler = tmp_path / "calls", tmp_path / "quick", tmp_path / "compiler"
    script = HANGS
    for name, value in {"calls": calls, "quick": quick, "one": one, "two": two}.items():
        script = script.replace(f"{{{name}}}", str(value))
    compiler.write_text(script)
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    for name, value in {"XDG_CACHE_HOME": tmp_path, "CXX": compiler}.items():
        monkeypatch.setenv(name, str(value))
    code = "from setpoint.engine.kernels.cpu import build; build.ensure_built('scalar')"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    until = time.monotonic() + 120
    while len(list(build.cache_dir().glob("objects-*/*.o"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(list(build.cache_dir().glob("build-*"))) == 1
    quick.touch()
    calls.write_text("")
    counts: list[str] = []
    with reported_to(counts.append):
        library = build.ensure_built("scalar")
    assert "2 of" in counts[0]
    assert {Path(call).stem for call in calls.read_text().split()} == set(rest)
    assert list(build.cache_dir().iterdir()) == [library]
