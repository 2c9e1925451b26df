"""Writes tests/durations.json from the JUnit report of a run: file -> seconds of its tests. The
suite starts the longest files first. ``make durations`` runs the quick suite and this script."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def main(report: str) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        seconds[case.attrib["classname"].replace(".", "/") + ".py"] += float(case.attrib["time"])
    known = {path: round(each, 1) for path, each in sorted(seconds.items())}
    (REPOSITORY / "tests" / "durations.json").write_text(json.dumps(known, indent=0) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
