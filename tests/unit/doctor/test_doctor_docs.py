"""The doctor's page: what it says of the causes is what the checks say, its example is what the command
prints, and every name of the contract is explained. README's sample is the first half of a report.

After a change of the checks: ``python tests/unit/doctor/test_doctor_docs.py`` writes table and examples
anew.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import setpoint
from setpoint.doctor.checks import CHECKS
from setpoint.doctor.checks.check import Check
from setpoint.doctor.contract import contract
from setpoint.doctor.findings import Report

PAGE = Path(setpoint.__file__).parents[2] / "docs" / "doctor.md"
README = PAGE.parents[1] / "README.md"
TABLE = re.compile(r"(<!-- causes: [^\n]*-->\n)(.*?)(<!-- end of causes -->)", re.DOTALL)
EXAMPLE = re.compile(
    r"(`(tests/doctor_corpus/[^`]*)`.*?`setpoint doctor ([^`]*)`:\n\n```text\n)(.*?)(```\n)",
    re.DOTALL,
)


def printed(case: str, name: str) -> str:
    """What the command prints on a terminal of 100 columns for a case of the corpus, in a file of
    this name."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(PAGE.parents[1] / case, Path(folder, name))
        done = subprocess.run(
            [sys.executable, "-m", "setpoint.cli", "doctor", name],
            cwd=folder,
            env={**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
    assert done.returncode == 1, done.stderr
    return done.stdout


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
    return f"### {check.cause}\n\n{paragraphs}"


def _wrapped(text: str) -> str:
    """As Markdown of 100 columns; "**" alone is meant as Markdown."""
    safe = re.sub(r"(?<!\*)([*_<|])(?!\*)", r"\\\1", text)
    return textwrap.fill(safe, 100, break_long_words=False, break_on_hyphens=False)


def written(text: str) -> str:
    text = TABLE.sub(lambda found: found[1] + causes() + found[3], text)
    return EXAMPLE.sub(lambda found: found[1] + printed(found[2], found[3]) + found[5], text)


def test_table_and_example_are_current() -> None:
    text = PAGE.read_text()
    assert TABLE.search(text)
    assert EXAMPLE.search(text)
    assert text == written(text)


def shortened(text: str) -> str:
    """README with the report up to its evidence."""

    def sample(found: re.Match[str]) -> str:
        first_half, _, _ = printed(found[2], found[3]).partition("\nEvidence")
        return found[1] + first_half.rstrip() + "\n" + found[5]

    return EXAMPLE.sub(sample, text)


def test_the_sample_in_readme_is_current() -> None:
    text = README.read_text()
    assert EXAMPLE.search(text)
    assert text == shortened(text)


def test_every_cause_is_told_with_its_evidence_and_advice() -> None:
    text = PAGE.read_text()
    for check in CHECKS:
        section = text.partition(f"### {check.cause}\n")[2].partition("\n### ")[0]
        assert "**Evidence.**" in section, check.cause
        assert "**Advice.**" in section, check.cause


def test_every_name_of_the_contract_is_explained() -> None:
    text = PAGE.read_text()
    for name in contract(Report("healthy", "", [], 1.0, [])):
        assert f'"{name}"' in text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    README.write_text(shortened(README.read_text()))
