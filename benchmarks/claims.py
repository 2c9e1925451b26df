"""Writes what README.md claims about speed, from the newest comparison with the peers.

    python benchmarks/claims.py        # the table between README's marks, and docs/peers.svg

A test generates the same text and compares it with the page, so an old table cannot stay beside a
newer result. If the kernels have changed since the commit of that result, the text says so.
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
    ("W1", "one stream: first token, ms ↓", TTFT),
    ("W1", "one stream: decode, tok/s ↑", DECODE),
    ("W2", "64 × (128 in, 128 out): output, tok/s ↑", OUTPUT),
    ("W3", "64 × (1,024 shared + 32 in, 32 out), s ↓", WALL),
    ("W4", "16 × 512 in: prefill, tok/s ↑", PREFILL),
)
NAMES = {
    "setpoint": "**Setpoint**, bf16",
    "int8": "**Setpoint**, `--quantization w8a8_int8`",
    "blocks": "**Setpoint**, the default model as shipped (4-bit GGUF)",
    "vLLM": "vLLM, bf16, compiled",
    "vLLM W8A8": "vLLM, W8A8, compiled",
    "OpenVINO fp16": "OpenVINO GenAI, bf16, without HTTP",
    "OpenVINO int8": "OpenVINO GenAI, 8-bit weights, without HTTP",
}
"""Name of a contender in the result file -> its name in the table; others keep their name."""
ORDER = (
    "blocks",
    "setpoint",
    "vLLM",
    "OpenVINO fp16",
    "llama.cpp BF16",
    "int8",
    "vLLM W8A8",
    "OpenVINO int8",
    "llama.cpp Q8_0",
    "llama.cpp Q4_0",
)
"""The rows of the table: what `setpoint serve` runs without options, then by precision, ours first.
Contenders that are not named here come last."""


def newest_result() -> Path:
    """The result file of the latest comparison with the peers on the default model."""
    return max(RESULTS.glob("*-peers.json"))


def kernels_changed_since(commit: str) -> bool | None:
    """Whether a commit after this one touches the kernels; None if git does not know this one."""
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
        "| | start, s ↓ | " + " | ".join(title for _, title, _ in COLUMNS) + " |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for who in sorted(contenders, key=_sort_key):
        cells = [_median_cell(result["start_s"][who])]
        for name, _, metric in COLUMNS:
            samples = [Sample(**each) for each in result["samples"][name].get(who, [])]
            cells.append(_median_cell([metric.of(workloads[name], sample) for sample in samples]))
        rows.append(f"| {NAMES.get(who, who)} | {' | '.join(cells)} |")
    turns = {who: len(result["start_s"][who]) for who in contenders}
    others = sorted({number for who, number in turns.items() if who != "setpoint"})
    often = "once" if others == [1] else f"{' or '.join(map(str, others))} times"
    text = (
        f"Every engine ran SmolLM2-135M-Instruct with the same client in one session, on"
        f" {machine['cpus']} virtual cores ({machine['cpu']}; commit {result['commit']},"
        f' {result["date"]}). "64 × (128 in, 128 out)" means 64 requests at once, each with a'
        " prompt of 128 tokens and an answer of 128 tokens. Less is better in columns with ↓,"
        f" more in those with ↑. Setpoint (bf16) ran {turns['setpoint']} times, once before each"
        f" other engine, and the table has the medians. Every other engine ran {often}."
        " [benchmarks/README.md](benchmarks/README.md) has the commands, the versions and the"
        " conditions of the comparison; the [result](benchmarks/results/"
        f"{newest_result().name}) has every sample."
    )
    if changed:
        text += (
            " The kernels have changed since that commit, and the comparison has not been run"
            " again yet."
        )
    return "\n" + _wrap(text) + "\n\n" + "\n".join(rows) + "\n\n"


def with_newest_result(page: str) -> str:
    """README's text with the section about the newest result in place of the old one."""
    result = json.loads(newest_result().read_text())
    changed = kernels_changed_since(result["commit"])
    if changed is None:
        changed = "The kernels have changed since" in page
    return MARKED.sub(lambda found: found[1] + section(result, changed=changed) + found[3], page)


def _sort_key(who: str) -> tuple[int, str]:
    return (ORDER.index(who) if who in ORDER else len(ORDER), who)


def _median_cell(values: Sequence[float | None]) -> str:
    """The median of the known values as text; a dash if none is known."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    median = statistics.median(known)
    return f"{median:,.0f}" if median >= 20 else f"{median:.1f}"


def _wrap(text: str, width: int = 100) -> str:
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
    PAGE.write_text(with_newest_result(PAGE.read_text()))
    PICTURE.write_text(chart(json.loads(newest_result().read_text())))
    print(f"{PAGE.name} and {PICTURE.name} are written from {newest_result().name}")


if __name__ == "__main__":
    main()
