"""Writes what README.md claims about speed, from the newest comparison with the peers.

    python benchmarks/claims.py        # the table between README's marks, and docs/peers.svg

A test runs the same and compares, so the page cannot keep an old table beside a newer result. If
the kernels have changed since the commit of that result, the text says so.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chart import chart
from contenders import Sample
from report import DECODE, OUTPUT, PREFILL, TTFT, WALL, Metric
from workloads import Workload

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
PAGE = REPOSITORY / "README.md"
PICTURE = REPOSITORY / "docs" / "peers.svg"
KERNELS = "src/setpoint/engine/kernels"
MARKED = re.compile(
    r"(<!-- measured: written by `python benchmarks/claims.py` -->\n)(.*?)"
    r"(<!-- end of measured -->)",
    re.DOTALL,
)
COLUMNS: Sequence[tuple[str, str, Metric]] = (
    ("W1", "one stream: first token, ms", TTFT),
    ("W1", "one stream: decode, tok/s", DECODE),
    ("W2", "64 × (128 in, 128 out): output, tok/s", OUTPUT),
    ("W3", "64 × (1,024 shared + 32 in, 32 out), s", WALL),
    ("W4", "16 × 512 in: prefill, tok/s", PREFILL),
)
NAMES = {
    "setpoint": "**Setpoint**, bf16",
    "int8": "**Setpoint**, `--quantization w8a8_int8`",
    "blocks": "**Setpoint**, the file's own 4-bit blocks (the default)",
    "vLLM": "vLLM, bf16, compiled",
    "vLLM W8A8": "vLLM, W8A8, compiled",
    "OpenVINO fp16": "OpenVINO GenAI, bf16, called directly",
    "OpenVINO int8": "OpenVINO GenAI, 8-bit weights, called directly",
}
"""Contender of a result file -> what the table calls it; others keep their name."""
ORDER = (
    "setpoint",
    "vLLM",
    "OpenVINO fp16",
    "llama.cpp BF16",
    "int8",
    "vLLM W8A8",
    "OpenVINO int8",
    "llama.cpp Q8_0",
    "blocks",
    "llama.cpp Q4_0",
)
"""By precision, ours first; those that are not named here come last."""


def newest() -> Path:
    """The result file of the latest comparison with the peers on the default model."""
    return max(RESULTS.glob("*-peers.json"))


def kernels_changed_since(commit: str) -> bool | None:
    """Whether a commit after this one touches the kernels; None where git does not know it."""
    found = subprocess.run(
        ["git", "log", "--format=%h", f"{commit}..HEAD", "--", KERNELS],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    return None if found.returncode else bool(found.stdout.strip())


def section(result: dict[str, Any], *, changed: bool) -> str:
    """README's text about one result. changed: whether the kernels have changed since."""
    machine, contenders = result["machine"], result["contenders"]
    workloads = {each["name"]: Workload(**each) for each in result["workloads"]}
    rows = [
        "| | start, s | " + " | ".join(title for _, title, _ in COLUMNS) + " |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for who in sorted(contenders, key=_place):
        cells = [_number(result["start_s"][who])]
        for name, _, metric in COLUMNS:
            samples = [Sample(**each) for each in result["samples"][name].get(who, [])]
            cells.append(_number([metric.of(workloads[name], sample) for sample in samples]))
        rows.append(f"| {NAMES.get(who, who)} | {' | '.join(cells)} |")
    turns = {len(result["start_s"][who]) for who in contenders}
    text = (
        f"Every engine ran SmolLM2-135M-Instruct with the same client in one session, on"
        f" {machine['cpus']} virtual cores ({machine['cpu']}; commit {result['commit']},"
        f" {result['date']}). The figures are medians of {min(turns)} to {max(turns)} turns;"
        " Setpoint in bf16 has a turn before each of the others'."
        " [benchmarks/README.md](benchmarks/README.md) has the commands, the versions and what to"
        " know about the comparison; the [result](benchmarks/results/"
        f"{newest().name}) has every sample."
    )
    warning = "\n**The kernels have changed since that commit.**" if changed else ""
    return "\n" + _wrapped(text) + warning + "\n\n" + "\n".join(rows) + "\n\n"


def written(page: str) -> str:
    """The page with the section of the newest result."""
    result = json.loads(newest().read_text())
    changed = kernels_changed_since(result["commit"])
    if changed is None:
        changed = "The kernels have changed since" in page
    return MARKED.sub(lambda found: found[1] + section(result, changed=changed) + found[3], page)


def _place(who: str) -> tuple[int, str]:
    return (ORDER.index(who) if who in ORDER else len(ORDER), who)


def _number(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    middle = statistics.median(known)
    return f"{middle:,.0f}" if middle >= 20 else f"{middle:.1f}"


def _wrapped(text: str, width: int = 100) -> str:
    """The text in lines of at most ``width`` characters, broken at spaces."""
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def main() -> None:
    PAGE.write_text(written(PAGE.read_text()))
    PICTURE.write_text(chart(json.loads(newest().read_text())))
    print(f"written from {newest().name}: {PAGE.name}, {PICTURE.name}")


if __name__ == "__main__":
    main()
