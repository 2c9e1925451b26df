"""Everything that is to be measured on a GPU, in ten minutes: each part in a process with a time
limit of its own, with results that are written as they come.

    TRITON_CACHE_DIR=… python benchmarks/gpu/run_all.py --out FOLDER [--only PART …] [--resume]

FOLDER gets a JSON file and a log for each part, and all results in results.md, beside what
``roofline.py`` predicts and what was aimed at. It may be cut at any moment; --resume goes on with
the parts that are not done. --rehearse runs every part without a GPU, on tiny models and with
Triton's interpreter: its figures mean nothing, and a folder never has both kinds. The exit status
is 0 if every part is done, 1 if not, 2 if the run was refused, and 130 or 143 if a signal ended it.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.results import TABLE, Part, end_of, read, table, write

from setpoint.config.hardware import why_no_cuda

BENCHMARKS = Path(__file__).resolve().parents[1]
PARTS = {
    "rates": 25,
    "kernels": 60,
    "sweeps": 60,
    "goldens": 90,
    "steps": 110,
    "offline": 95,
    "many-rows": 110,
    "mixtures": 45,
}
"""Part -> most seconds that it may take."""
REHEARSED = 6
"""A rehearsal may take so many times as long, because interpreted kernels are slow."""
GRACE_S = 5.0
LEAST_S = 3.0
"""With less time left a part does not begin."""


def run_part(name: str, out: Path, *, limit_s: float, rehearse: bool) -> None:
    """Run a part to its end or to its limit, and note how it ended."""
    command = [sys.executable, "-m", "gpu.part", name, str(out)]
    command += ["--rehearse"] if rehearse else []
    (out / f"{name}.json").unlink(missing_ok=True)
    before, began, state = kernels_in_cache(), time.monotonic(), "interrupted"
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment(rehearse), start_new_session=True
        )
        try:
            state = _outcome(process, out, began + limit_s)
        finally:
            _end(process)
            end_of(
                out,
                name,
                state,
                seconds=time.monotonic() - began,
                compiled=kernels_in_cache() - before,
                rehearsal=rehearse,
            )


def environment(rehearse: bool) -> Mapping[str, str]:
    paths = [BENCHMARKS, BENCHMARKS.parent / "src", BENCHMARKS.parent / "tests"]
    interpret = {"TRITON_INTERPRET": "1" if rehearse else "0"}
    rehearsed = {"REHEARSE_GPU_TESTS": "1", "CUDA_VISIBLE_DEVICES": ""} if rehearse else {}
    return {**os.environ, "PYTHONPATH": ":".join(map(str, paths)), **interpret, **rehearsed}


def _outcome(process: subprocess.Popen[bytes], out: Path, deadline: float) -> str:
    while time.monotonic() < deadline:
        try:
            code = process.wait(min(1.0, max(deadline - time.monotonic(), 0.01)))
        except subprocess.TimeoutExpired:
            show(out)
            continue
        return "done" if code == 0 else f"ended with code {code}; see its log"
    return "cut at its limit"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part, and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def kernels_in_cache() -> int:
    """Compiled kernels that Triton keeps on disk."""
    folder = os.environ.get("TRITON_CACHE_DIR") or Path("~/.triton/cache").expanduser()
    return sum(1 for _ in Path(folder).rglob("*.cubin"))


def show(out: Path) -> list[Part]:
    """Write the table of all parts that there are."""
    parts = [part for name in PARTS if (part := read(out, name))]
    write(out / TABLE, table(parts))
    return parts


def other_kind(out: Path, *, rehearse: bool) -> str | None:
    """What else than this run a folder has results of; None if nothing."""
    parts = (read(out, name) for name in PARTS)
    if all(part is None or part.found["rehearsal"] == rehearse for part in parts):
        return None
    return "a GPU" if rehearse else "a rehearsal"


class _Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above zero, not {text}")
    return minutes


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End the run on a signal; what is running is ended and noted on the way out, which further
    signals do not cut short."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    name = signal.Signals(number).name
    print(f"{Path(__file__).name}: {name}: the rest is for --resume", file=sys.stderr)
    sys.exit(128 + number)


def main() -> None:
    parser = _Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=_minutes, help="for all parts; 10, of a rehearsal 60")
    parser.add_argument("--resume", action="store_true", help="skip parts that are done")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    args = parser.parse_args()
    if not args.rehearse and (why := why_no_cuda()):
        parser.error(f"no GPU: {why}; --rehearse runs without one")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        kind = other_kind(args.out, rehearse=args.rehearse)
        if kind is None:
            write(args.out / TABLE, "")
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}")
    if kind is not None:
        parser.error(f"{args.out} has results of {kind}: name another folder")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    try:
        _run(args)
    finally:
        parts = show(args.out)
    print(table(parts))
    sys.exit(0 if all(part.is_done for part in parts) else 1)


def _run(args: argparse.Namespace) -> None:
    """Run the parts that were asked for, while there is time."""
    minutes = args.minutes or (60.0 if args.rehearse else 10.0)
    deadline = time.monotonic() + 60 * minutes
    for name in args.only:
        part = read(args.out, name)
        if args.resume and part is not None and part.is_done:
            continue
        limit_s = PARTS[name] * (REHEARSED if args.rehearse else 1)
        limit_s = min(limit_s, deadline - time.monotonic() - GRACE_S)
        if limit_s < LEAST_S:
            end_of(args.out, name, "not begun: no time was left", rehearsal=args.rehearse)
        else:
            print(f"{name}: at most {limit_s:.0f} s", flush=True)
            run_part(name, args.out, limit_s=limit_s, rehearse=args.rehearse)


if __name__ == "__main__":
    main()
