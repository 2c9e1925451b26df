"""What docs/tuning.md names exists: verdicts, metrics, log fields and charts; an option that it
calls live is live, and one that it says needs a restart is not. Its figures are those of the newest
result (benchmarks/tuning.py)."""

from __future__ import annotations

import re
from pathlib import Path

import setpoint
from setpoint.config.live_changes import read_values
from setpoint.config.options import OPTION_FIELDS
from setpoint.doctor.checks import CHECKS
from setpoint_testing.page_commands import commands

SOURCE = Path(setpoint.__file__).parent
PAGE = (SOURCE.parents[1] / "docs" / "tuning.md").read_text()
SEE = re.findall(r"^\| See \| (.*) \|$", PAGE, re.MULTILINE)
CHANGE = re.findall(r"^\| Change \| (.*) \|$", PAGE, re.MULTILINE)
WATCH = re.findall(r"^\| (?:[^|]*\|){4} [^|]* \|$", PAGE, re.MULTILINE)
"""The table of figures to watch."""
LABEL = re.compile(r"\b(log|metric|console|doctor)\b")


def named(label: str) -> set[str]:
    """What the rows "See" give under one label: names in backticks, of charts in italics."""
    found: set[str] = set()
    for row in SEE:
        parts = LABEL.split(row.split(". ")[0])
        for kind, text in zip(parts[1::2], parts[2::2], strict=True):
            if kind == label:
                found |= set(
                    re.findall(r"\*([^*]+)\*" if kind == "console" else r"`([^`]+)`", text)
                )
    return found


def test_every_part_has_the_same_rows() -> None:
    rows = re.findall(r"^\| (Guides|Setpoint|See|Change|Measured) \| .+ \|$", PAGE, re.MULTILINE)
    own = rows[rows.index("Measured") + 1 :]  # the first table explains them
    assert len(own) >= 5 * 18
    assert own == ["Guides", "Setpoint", "See", "Change", "Measured"] * (len(own) // 5)


def test_verdicts_exist() -> None:
    causes = {check.cause for check in CHECKS}
    assert len(named("doctor")) > 15
    assert named("doctor") <= causes


def test_metrics_exist() -> None:
    catalogue = (SOURCE.parents[1] / "docs" / "metrics.md").read_text()
    metrics = set(re.findall(r"(?:sglang|setpoint):[a-z_]+", PAGE))
    assert len(metrics) > 15
    assert {metric for metric in metrics if f"| `{metric}` |" not in catalogue} == set()


def test_log_fields_exist() -> None:
    sources = ("observe/logline.py", "launch/child/loading.py", "frontend/telemetry/limit_news.py")
    log = "".join((SOURCE / name).read_text() for name in sources)
    log = re.sub(r'"\s*\n\s*f?"', "", log)  # literals that continue on the next line
    fields = named("log") | {
        field for row in WATCH for field in re.findall(r"`([^`]+)`", row.split("|")[3])
    }
    assert len(fields) > 12
    assert {field for field in fields if field.removesuffix(" …").rstrip(":") not in log} == set()


def test_charts_exist() -> None:
    console = "".join(
        path.read_text() for path in (SOURCE / "frontend/console/static").glob("*.js")
    )
    charts = named("console") | {
        chart for row in WATCH for chart in re.findall(r"\*([^*]+)\*", row.split("|")[5])
    }
    assert len(charts) > 6
    assert {chart for chart in charts if f'"{chart}"' not in console} == set()


def test_options_are_live_or_need_a_restart_as_the_page_says() -> None:
    live = {field.flag for field in OPTION_FIELDS if field.about.live}
    fields = {field.flag for field in OPTION_FIELDS}
    num_live = num_fixed = 0
    for row in CHANGE:
        for _, name, *words in commands(row, "setpoint"):
            if name == "set":
                changes = dict(word.split("=", 1) for word in words[1:] if "=" in word)
                assert read_values(changes)
                num_live += 1
            elif name == "serve" and "planned for" not in row:
                flags = {word for word in words if word.startswith("--")}
                assert flags <= fields
                assert not flags & live, row
                num_fixed += 1
    assert min(num_live, num_fixed) > 5
