"""Forms of constraints that the grammar library does not know, and what clients are told of others."""

from __future__ import annotations

import pytest
from grammar_cases import refusal, verdict

from setpoint.core.errors import RequestError
from setpoint.grammar.definition import check_whitespace


@pytest.mark.parametrize(
    ("grammar", "text", "wanted"),
    [
        (r'root ::= "\u00e9"', "é", "ends"),
        (r'root ::= "\u0022\u0041"', '"A', "ends"),
        (r"root ::= [\u00e8-\u00ea]", "é", "ends"),
        (r'root ::= "\U0001F600"', "😀", "ends"),
        (r'root ::= "\\u00e9"', r"\u00e9", "ends"),
    ],
)
def test_unicode_escapes_of_ebnf(grammar: str, text: str, wanted: str) -> None:
    """Red before: a lexer error, or another text."""
    assert verdict(text, ebnf=grammar) == wanted


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", r"\0", r"\0 is written \x00"),
        ("ebnf", f'root ::= {"(" * 50_000}"a"{")" * 50_000}', "groups in the grammar are nested"),
        ("json_schema", "[" * 100_000, "the schema is nested too deeply"),
        ("json_schema", r'{"const": "\ud800"}', r"one half of a surrogate pair (\ud800 to \udfff)"),
    ],
)
def test_what_is_refused_is_named(kind: str, text: str, words: str) -> None:
    message = refusal(**{kind: text})
    assert words in message
    assert "recursion" not in message


def test_whitespace_that_takes_too_much_work_is_refused() -> None:
    with pytest.raises(RequestError, match="takes too much work to compile"):
        check_whitespace(" {0,100000}")
