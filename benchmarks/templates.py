"""Compares the prompts that chat templates make here with those of transformers.

    python benchmarks/templates.py FOLDER … [--show 3]

Every *.jinja file below the folders is rendered with the conversations of
setpoint_testing.template_comparison. Exits with 1 if transformers renders one that is refused here,
or if a text differs.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

from setpoint_testing.template_comparison import CASES, FAULTS, Outcome, Verdict, compare

VERDICTS = get_args(Verdict)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--show", type=int, default=3, help="how many faults to print in full")
    args = parser.parse_args()
    sources = _sources(args.folders)
    print(f"{len(sources)} different templates, {len(CASES)} conversations each\n")
    by_case: dict[str, Counter[str]] = {case.name: Counter() for case in CASES}
    faults: list[tuple[Path, Outcome]] = []
    for path, source in sources:
        for outcome in compare(source):
            by_case[outcome.case.name][outcome.verdict] += 1
            if outcome.verdict in FAULTS:
                faults.append((path, outcome))
    _print_table(by_case)
    for path, outcome in faults:
        print(f"{outcome.verdict}: {outcome.case.name}: {path}")
    for path, outcome in faults[: args.show]:
        print(f"\n=== {path}: {outcome.case.name}\n--- transformers\n{outcome.theirs}")
        print(f"--- here\n{outcome.ours}")
    sys.exit(1 if faults else 0)


def _sources(folders: list[Path]) -> list[tuple[Path, str]]:
    """(path, text) of each different template, in the order of the paths."""
    found: dict[str, tuple[Path, str]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.jinja")):
            text = path.read_text(encoding="utf-8")
            found.setdefault(hashlib.sha256(text.encode()).hexdigest(), (path, text))
    return list(found.values())


def _print_table(by_case: dict[str, Counter[str]]) -> None:
    width = max(map(len, by_case))
    print(" " * width, *(f"{name:>12}" for name in VERDICTS))
    total: Counter[str] = Counter()
    for name, counts in by_case.items():
        total += counts
        print(f"{name:<{width}}", *(f"{counts[each]:>12}" for each in VERDICTS))
    print(f"{'all':<{width}}", *(f"{total[each]:>12}" for each in VERDICTS), "\n")


if __name__ == "__main__":
    main()
