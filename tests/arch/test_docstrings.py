"""How docstrings begin, and that the dotted names in them exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docstrings import docstrings
from dotted_names import exists

WITHOUT_SUBJECT = re.compile(r"(?:Of|In|As|By|That|Those|To whom)\b")
DOTTED = re.compile(r"(?<!`)``([A-Za-z_]\w*(?:\.\w+)+)(?:\([^`]*\))?``(?!`)")


def test_docstrings_begin_with_a_subject() -> None:
    """A docstring such as "Of each rank." makes the reader search for what it speaks about."""
    found = [
        f"{each.where}: {each.text.splitlines()[0]}"
        for each in docstrings()
        if WITHOUT_SUBJECT.match(each.text)
    ]
    assert not found, f"{len(found)} docstrings\n" + "\n".join(found)


def test_dotted_names_in_docstrings_exist() -> None:
    found = [
        f"{each.where}: {name}"
        for each in docstrings()
        for name in DOTTED.findall(each.text)
        if not exists(name, each.path)
    ]
    assert not found, f"{len(found)} names\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("core.plan", True),
        ("plan.Rows", True),
        ("core.plan.Rows.starts", True),
        ("Rows.starts", True),
        ("Rows.begins", False),
        ("core.plan.Columns", False),
        ("core.base.Rows", False),
        ("quant.base", False),
        ("setpoint.Engine", True),
        ("os.environ", True),
        ("each.where", True),
        ("each.Where", False),
        ("nobody.where", False),
        ("config.json", True),
    ],
)
def test_the_search_tells_names_that_exist(name: str, wanted: bool) -> None:
    assert exists(name, Path(__file__)) == wanted
