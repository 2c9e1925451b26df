"""Expressions without the flag i match what Python's match with it, by the rules of ASCII."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from setpoint.core.errors import RequestError
from setpoint.schemas.expressions import is_found
from setpoint.schemas.ignored_case import with_case_ignored

LETTERS = "akszAKSZ-]^\\_9ſ\u212a"
items = st.sampled_from(
    (*"akszAKSZ9", "a-z", "A-S", r"\w", r"\d", r"\W", r"\-", r"\]", r"\x6b", r"\x53-\x5a", "_-a")
)
classes = st.builds(
    lambda no, inside, end: f"[{no}{''.join(inside)}{end}]",
    st.sampled_from(["", "^"]),
    st.lists(items, min_size=1, max_size=4),
    st.sampled_from(["", "-"]),
)
atoms = st.one_of(st.sampled_from((*"akszAKSZ9_", ".", r"\w", r"\W", r"\x4B", r"\\")), classes)
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?i:{})".format, inner),
        st.builds("(?-i:{})".format, inner),
        st.builds("({})?".format, inner),
    ),
    max_leaves=8,
)


@given(expressions, st.booleans(), st.text(LETTERS, max_size=4))
def test_the_flag_means_what_it_means_among_letters_of_ascii(
    expression: str, everywhere: bool, text: str
) -> None:
    expression = f"(?i){expression}" if everywhere else expression
    wanted = re.compile(expression, re.ASCII).fullmatch(text)
    written = with_case_ignored(expression)
    assert "(?i" not in written
    found = re.compile(written, re.ASCII).fullmatch(text)
    assert (found is None) == (wanted is None), written


@pytest.mark.parametrize(
    ("expression", "written"),
    [
        ("a[b-d]", "a[b-d]"),
        (r"\(?i)s", r"\(?i)s"),
        ("a(?i)b|c(?-i)d", "a[bB]|[cC]d"),
        ("(?i)(a(?-i)b)c", "([aA]b)[cC]"),
        ("(?is)(?P<name>a.)", "(?s)(?P<name>[aA].)"),
        ("(?i-s)a", "(?-s)[aA]"),
        ("(?i)σ", "[σΣς]"),
        ("(?i)[À-Ã]", "[àáâãÀ-Ã]"),
        ("(?i)[a-z&&[^s]]", "[ABCDEFGHIJKLMNOPQRSTUVWXYZa-z&&[^Ss]]"),
        ("(?i)[[:upper:]_]", "[[:alpha:]_]"),
        (r"(?i)\p{Lu}[\p{Lu}s]", r"(?i:\p{Lu})(?i:[\p{Lu}s])"),
        ("(?i)[a-c-e]", "[ABCa-c-Ee]"),
    ],
)
def test_what_is_written(expression: str, written: str) -> None:
    assert with_case_ignored(expression) == written


def test_a_long_expression_is_refused_in_time() -> None:
    with pytest.raises(RequestError, match="too many ranges"):
        with_case_ignored("(?i)[" + "\0-\U0010ffff" * 80_000 + "]")


def test_schemas_are_judged_by_the_same_rules() -> None:
    """Red before: Python's ASCII does not know the case of other letters."""
    assert is_found("(?i)^É$", "é")
    assert is_found("(?i)^s$", "ſ") is False
