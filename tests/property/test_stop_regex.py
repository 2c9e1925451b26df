"""Stop expressions are found wherever the text is cut, as Python's own search finds them; a hostile
one takes no time."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from setpoint.core.errors import RequestError
from setpoint.frontend.text.stop_regex import MAX_EDGES, compile_expressions
from setpoint.frontend.text.stops import StopFinder

texts = st.text(alphabet="abc1 \nÄä", max_size=14)
cuts = st.lists(st.integers(1, 5), min_size=14, max_size=14)
atoms = st.sampled_from(
    ["a", "b", "c", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", r"\W", "[a-c1]", "(?i:A)", "(?i:ä)"]
)
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds("({}{})".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds(
            "({}){}".format,
            inner,
            st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?"]),
        ),
    ),
    max_leaves=5,
)


def expected(text: str, stops: list[str], regexes: list[str], keep: bool) -> tuple[str, str | None]:
    """The text and the stop by definition: the stop complete first, the longest of those, a stop
    string before an expression."""
    for end in range(1, len(text) + 1):
        found = [
            (start, kind, index, stop)
            for start in range(end)
            for kind, group in enumerate((map(re.escape, stops), regexes))
            for index, stop in enumerate(group)
            if re.fullmatch(stop, text[start:end])
        ]
        if found:
            start, kind, index, _ = min(found)
            return text[: end if keep else start], (stops, regexes)[kind][index]
    return text, None


def usable(regexes: list[str]) -> bool:
    try:
        compile_expressions(tuple(regexes))
    except RequestError:
        return False
    return True


@given(
    texts,
    st.lists(expressions, min_size=1, max_size=2, unique=True),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=1),
    cuts,
    st.booleans(),
)
def test_any_cutting_gives_what_the_definition_says(
    text: str, regexes: list[str], stops: list[str], cuts: list[int], keep: bool
) -> None:
    assume(usable(regexes))
    finder = StopFinder(stops, regexes=tuple(regexes), keep=keep)
    certain, matched = expected(text, stops, regexes, keep)
    out, start = "", 0
    for size in cuts:
        if finder.matched is None and start < len(text):
            out += finder.feed(text[start : start + size])
            start += size
            assert certain.startswith(out), "nothing of a match may leave"
    if finder.matched is None:
        out += finder.flush()
    assert (out, finder.matched) == (certain, matched)


@given(expressions)
def test_what_matches_nothing_at_all_is_refused(expression: str) -> None:
    if re.fullmatch(expression, "") is None:
        compile_expressions((expression,))
    else:
        with pytest.raises(RequestError, match="matches the empty text"):
            compile_expressions((expression,))


def test_text_that_cannot_become_a_match_leaves_at_once() -> None:
    finder = StopFinder([], regexes=(r"\n\nQ\d+:",))
    assert [finder.feed(piece) for piece in ("yes\n", "no\n\n", "Q1", "2 ", "\n\nQ7")] == [
        *("yes", "\nno", "", "\n\nQ12 ", ""),
    ]
    assert finder.feed(": why") == ""
    assert finder.matched == r"\n\nQ\d+:"


def test_hidden_text_is_searched() -> None:
    finder = StopFinder([], regexes=("end<.*?>",))
    assert finder.feed("the end") == "the "
    assert finder.feed("<|x|>", hidden=True) == ""
    assert finder.matched == "end<.*?>"


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("a(", "is not a valid expression: missing ), unterminated subpattern"),
        ("[", "is not a valid expression"),
        ("a{9999999999999}", "is not a valid expression"),
        ("(" * 127 + "a" + ")" * 127, None),
        ("a*", "matches the empty text"),
        ("", "matches the empty text"),
        ("(){1000000000}", "matches the empty text"),
        ("^", "matches the empty text"),
        (r"\s*$", "matches the empty text"),
        (r"\b", "matches the empty text"),
        ("(?=a)b", "uses look-around"),
        ("(?!a)b", "uses look-around"),
        ("(?<=a)b", "uses look-around"),
        (r"(a)\1", "uses look-around, a reference"),
        ("(?P<x>a)(?P=x)", "uses look-around, a reference"),
        ("(?>a+)b", "an atomic part"),
        ("a*+b", "an atomic part"),
        ("(^|$|a)" * 30, "is too complex"),
        ("a{100000}", "is too complex"),
        ("((((a{20}){20}){20}){20}){20}", "is too complex"),
        ("(a?){300}b", "is too complex"),
    ],
)
def test_what_is_not_searched_is_refused_with_its_reason(expression: str, why: str | None) -> None:
    if why is None:
        compile_expressions((expression,))
        return
    with pytest.raises(RequestError) as caught:
        compile_expressions((expression,))
    assert caught.value.message.startswith("stop_regex ")
    assert why in caught.value.message


@pytest.mark.parametrize(
    "expression", ["(a+)+b", "(a|a)*b", "(.*)*(.*)*b", "(a?){28}a{20}b", r"(\ba+)+$b", "(a|^a)*b$"]
)
def test_a_hostile_expression_takes_linear_time(expression: str) -> None:
    """Python's search takes exponential time for these; the bound leaves a factor of a hundred to a
    slow machine."""
    pattern = compile_expressions((expression,))
    assert sum(bits.bit_count() for each in pattern.follow for bits in each.values()) <= MAX_EDGES
    finder = StopFinder([], regexes=(expression,))
    started = time.process_time()
    finder.feed("a" * 2000)
    assert time.process_time() - started < 20


anchors = st.sampled_from(["^", "$", r"\A", r"\Z", r"\b", r"\B", "(?m:^)", "(?m:$)", r"(?a:\b)"])
anchored = st.recursive(
    st.one_of(atoms, anchors),
    lambda inner: st.one_of(
        st.builds("({}{})".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(["*", "+", "?", "{1,2}"])),
    ),
    max_leaves=6,
)


def expected_with_anchors(text: str, regexes: list[str], ends: list[int]) -> tuple[str, str | None]:
    """The text and the stop by definition: after each token, Python looks at the text so far. Of
    the matches that it may find the one that is complete first, and the longest of those."""
    for end in ends:
        so_far = text[:end]
        for stop in range(1, end + 1):
            for start in range(stop):
                for regex in regexes:
                    ending = rf"(?=(?s:.{{{end - stop}}})\Z)"
                    if re.compile(f"(?:{regex}){ending}").match(so_far, start):
                        return text[:start], regex
    return text, None


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # many match the empty text
@given(texts, st.lists(anchored, min_size=1, max_size=2, unique=True), cuts)
def test_anchors_hold_in_the_text_so_far(text: str, regexes: list[str], cuts: list[int]) -> None:
    assume(usable(regexes))
    ends = [end for end in itertools.accumulate(cuts) if end < len(text)] + [len(text)]
    finder, out = StopFinder([], regexes=tuple(regexes)), ""
    for begin, end in itertools.pairwise([0, *ends]):
        if finder.matched is None:
            out += finder.feed(text[begin:end])
    if finder.matched is None:
        out += finder.flush()
    assert (out, finder.matched) == expected_with_anchors(text, regexes, ends)


@pytest.mark.parametrize(
    ("expression", "tokens", "text"),
    [
        (r"[.!?]\s*$", ["Hi", ".", " Yes"], "Hi"),
        (r"[.!?]\s*$", ["3", ".1", "4! ", "Yes"], "3.14"),
        (r"^#", ["a#", "\n#"], None),
        (r"(?m)^#", ["a#", "\n", "#"], "a#\n"),
        (r"\bend\b", ["send", " ending", " end", "."], "send ending "),
        (r"\AQ:", ["Q", ":"], ""),
        (r"x\Z", ["xy", "x"], "xy"),
        (r"(?x) a  # a comment\n b \  c", ["a", "b c"], ""),
        (r"\x41[\]\-x]\n{2}", ["A]\n", "\n"], ""),
        (r"\101{,2}\N{BULLET}", ["b•"], "b"),
        ("(?i:É)x", ["éx"], ""),
        (r"a\B", ["xa", "b"], "x"),
        ("a{}b{,}c", ["a{}bbc"], ""),
    ],
)
def test_expressions_of_clients(expression: str, tokens: list[str], text: str | None) -> None:
    finder, out = StopFinder([], regexes=(expression,)), ""
    for token in tokens:
        if finder.matched is None:
            out += finder.feed(token)
    assert (finder.matched is None) is (text is None)
    assert text is None or out == text
