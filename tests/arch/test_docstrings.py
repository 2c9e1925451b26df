"""How docstrings begin, and that the dotted names in them exist."""

from __future__ import annotations

import re

from docstrings import docstrings

WITHOUT_SUBJECT = re.compile(r"(?:Of|In|As|That|To whom)\b")


def test_docstrings_begin_with_a_subject() -> None:
    """A docstring such as "Of each rank." makes the reader search for what it speaks about."""
    found = [
        f"{each.where}: {each.text.splitlines()[0]}"
        for each in docstrings()
        if WITHOUT_SUBJECT.match(each.text)
    ]
    assert not found, f"{len(found)} docstrings\n" + "\n".join(found)
