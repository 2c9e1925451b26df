"""Everything that is to be measured on a GPU, in ten minutes: each part in a process with a time
limit of its own, with results that are written as they come.

    TRITON_CACHE_DIR=… python benchmarks/gpu/run_all.py --out FOLDER [--only PART …] [--resume]

FOLDER gets a JSON file and a log for each part, and all results in results.md, beside what
``roofline.py`` predicts and what was aimed at. It may be cut at any moment; --resume goes on with
the parts that are not done. --rehearse runs every part without a GPU, on tiny models and with
Triton's interpreter: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.results import TABLE, Part, end_of, read, table, write

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
    before, began = kernels_in_cache(), time.monotonic()
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment(rehearse), start_new_session=True
        )
        try:
            state = _outcome(process, out, began + limit_s)
        finally:
            _end(process)
    seconds = time.monotonic() - began
    end_of(
        out,
        name,
        state,
        seconds=seconds,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, help="for all parts; 10, of a rehearsal 60")
    parser.add_argument("--resume", action="store_true", help="skip parts that are done")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
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
    parts = show(args.out)
    print(table(parts))
    sys.exit(0 if all(part.is_done for part in parts) else 1)


if __name__ == "__main__":
    main()
