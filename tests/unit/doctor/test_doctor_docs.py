"""The doctor's pages: what they say of the causes is what the checks say, the example is what the
command prints, as text and as JSON, and every name of the contract is explained. README's sample is
the first half of a report.

After a change of the checks: ``python tests/unit/doctor/test_doctor_docs.py`` writes causes and examples
anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import setpoint
from setpoint.doctor.checks import CHECKS
from setpoint.doctor.checks.check import Check
from setpoint.doctor.contract import contract
from setpoint.doctor.findings import Report

PAGE = Path(setpoint.__file__).parents[2] / "docs" / "doctor.md"
CAUSES = PAGE.with_name("doctor-causes.md")
README = PAGE.parents[1] / "README.md"
TABLE = re.compile(r"(<!-- causes: [^\n]*-->\n)(.*?)(<!-- end of causes -->)", re.DOTALL)
EXAMPLE = re.compile(
    r"(`setpoint doctor\s+(tests/doctor_corpus/[^`]*)`:\n\n```text\n)(.*?)(```\n)", re.DOTALL
)
JSON = re.compile(r"(```json\n)(.*?)(```\n)", re.DOTALL)
LONG = 60
"""Characters of a text in the example of the JSON; longer ones are cut."""


def printed(case: str, *options: str) -> str:
    """What the command prints about a log of the corpus on a terminal of 100 columns."""
    done = subprocess.run(
        [sys.executable, "-m", "setpoint.cli", "doctor", case, *options],
        cwd=PAGE.parents[1],
        env={**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stdout


def cut(value: Any) -> Any:
    """The JSON of a report with its long texts cut, and of evidence and exclusions the first."""
    if isinstance(value, str):
        return value if len(value) <= LONG else value[:LONG].rpartition(" ")[0] + " …"
    if isinstance(value, dict):
        return {
            name: cut(each[:1] if name in ("evidence", "ruled_out") else each)
            for name, each in value.items()
        }
    return [cut(each) for each in value] if isinstance(value, list) else value


def json_example(case: str) -> str:
    return json.dumps(cut(json.loads(printed(case, "--json"))), indent=2, ensure_ascii=False) + "\n"


def causes() -> str:
    """A table of all causes, and a section about each."""
    rows = [f"| [`{each.cause}`](#{each.cause}) | {each.title} |\n" for each in CHECKS]
    sections = "".join(_section(check) for check in CHECKS)
    return f"\n| cause | in a few words |\n|---|---|\n{''.join(rows)}\n{sections}"


def _section(check: Check) -> str:
    parts = (
        check.meaning,
        f"**Evidence.** {check.rule}",
        f"**Ruled out.** {check.counter_evidence}",
        f"**Advice.** {check.advice}",
    )
    paragraphs = "".join(f"{_wrapped(part)}\n\n" for part in parts)
    return f"## {check.cause}\n\n{paragraphs}"


def _wrapped(text: str) -> str:
    """The text as Markdown of 100 columns; "**" alone is meant as Markdown."""
    safe = re.sub(r"(?<!\*)([*_<|])(?!\*)", r"\\\1", text)
    return textwrap.fill(safe, 100, break_long_words=False, break_on_hyphens=False)


def written_causes(text: str) -> str:
    return TABLE.sub(lambda found: found[1] + causes() + found[3], text)


def written(text: str) -> str:
    """The page with its example anew, as text and as JSON."""
    text = EXAMPLE.sub(lambda found: found[1] + printed(found[2]) + found[4], text)
    example = EXAMPLE.search(text)
    assert example is not None
    return JSON.sub(lambda found: found[1] + json_example(example[2]) + found[3], text)


def test_the_causes_are_current() -> None:
    text = CAUSES.read_text()
    assert TABLE.search(text)
    assert text == written_causes(text)


def test_the_example_is_current() -> None:
    text = PAGE.read_text()
    assert JSON.search(text)
    assert text == written(text)


def shortened(text: str) -> str:
    """README with the report up to its evidence."""

    def sample(found: re.Match[str]) -> str:
        first_half, _, _ = printed(found[2]).partition("\nEvidence")
        return found[1] + first_half.rstrip() + "\n" + found[4]

    return EXAMPLE.sub(sample, text)


def test_the_sample_in_readme_is_current() -> None:
    text = README.read_text()
    assert EXAMPLE.search(text)
    assert text == shortened(text)


def test_every_cause_is_told_with_its_evidence_and_advice() -> None:
    text = CAUSES.read_text()
    for check in CHECKS:
        section = text.partition(f"\n## {check.cause}\n")[2].partition("\n## ")[0]
        assert "**Evidence.**" in section, check.cause
        assert "**Advice.**" in section, check.cause


def test_every_name_of_the_contract_is_explained() -> None:
    text = PAGE.read_text()
    for name in contract(Report("healthy", "", [], 1.0, [])):
        assert f'"{name}"' in text


if __name__ == "__main__":
    CAUSES.write_text(written_causes(CAUSES.read_text()))
    PAGE.write_text(written(PAGE.read_text()))
    README.write_text(shortened(README.read_text()))
