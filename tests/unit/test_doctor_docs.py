"""The doctor's page: its table of causes is that of the checks, and every name of the contract is
explained.

After a change of the checks: ``python tests/unit/test_doctor_docs.py`` writes the table anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import setpoint
from setpoint.advisor.doctor.checks import CHECKS
from setpoint.advisor.doctor.contract import contract
from setpoint.advisor.doctor.findings import Report

PAGE = Path(setpoint.__file__).parents[2] / "docs" / "doctor.md"
TABLE = re.compile(r"(<!-- causes: [^\n]*-->\n)(.*?)(<!-- end of causes -->)", re.DOTALL)


def table() -> str:
    rows = [f"| `{check.cause}` | {check.title} | {_first(check.meaning)} |\n" for check in CHECKS]
    return "\n| cause | in a few words | what it is |\n|---|---|---|\n" + "".join(rows) + "\n"


def _first(text: str) -> str:
    """Its first sentence, as it may stand in a table."""
    sentence = re.split(r"(?<=[.:])\s+(?=[A-Z])", text.strip(), maxsplit=1)[0]
    return sentence.replace("|", "\\|").rstrip(":")


def written(text: str) -> str:
    return TABLE.sub(lambda found: found[1] + table() + found[3], text)


def test_the_table_of_causes_is_that_of_the_checks() -> None:
    text = PAGE.read_text()
    assert TABLE.search(text)
    assert text == written(text)


def test_every_name_of_the_contract_is_explained() -> None:
    text = PAGE.read_text()
    for name in contract(Report("healthy", "", [], 1.0, [])):
        assert f'"{name}"' in text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
