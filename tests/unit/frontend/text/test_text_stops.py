"""Stop strings are found wherever the text is cut, and nothing of them leaks out."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from setpoint.frontend.text.stops import StopFinder

letters = st.text(alphabet="ab", max_size=12)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


def expected(text: str, stops: list[str], keep: bool) -> tuple[str, str | None]:
    """The text and the stop by definition: the stop string complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if keep else end - len(stop)], stop
    return text, None


@given(letters, stops, st.lists(st.integers(1, 5), min_size=12, max_size=12), st.booleans())
def test_any_cutting_gives_the_same_text_and_match(
    text: str, stops: list[str], cuts: list[int], keep: bool
) -> None:
    finder = StopFinder(stops, keep=keep)
    out = ""
    start = 0
    for size in cuts:
        if finder.matched is None and start < len(text):
            out += finder.feed(text[start : start + size])
            start += size
            certain, _ = expected(text, stops, keep)
            assert certain.startswith(out), "nothing of a stop string may leave"
    if finder.matched is None:
        out += finder.flush()
    assert (out, finder.matched) == expected(text, stops, keep)


@given(
    st.lists(st.tuples(st.sampled_from("abX"), st.booleans()), max_size=12),
    st.lists(st.text("abX", min_size=1, max_size=4)),
    st.booleans(),
)
def test_hidden_text_is_matched_but_never_shown(
    pieces: list[tuple[str, bool]], stops: list[str], keep: bool
) -> None:
    finder = StopFinder(stops, keep=keep)
    out = ""
    for text, hidden in pieces:
        if finder.matched is None:
            out += finder.feed(text, hidden=hidden)
    if finder.matched is None:
        out += finder.flush()
    certain, matched = expected("".join(text for text, _ in pieces), stops, keep)
    assert finder.matched == matched
    assert out == "".join(text for text, hidden in pieces[: len(certain)] if not hidden)


def test_a_stop_of_hidden_and_shown_text_is_cut_whole() -> None:
    finder = StopFinder(["ok<|end|>\n"])
    assert [
        finder.feed("well o"),
        finder.feed("k"),
        finder.feed("<|end|>", hidden=True),
        finder.feed(" "),
    ] == ["well ", "", "", "ok "]
    assert [finder.feed("ok"), finder.feed("<|end|>", hidden=True), finder.feed("\n")] == [
        "",
        "",
        "",
    ]
    assert finder.matched == "ok<|end|>\n"


def test_only_what_may_become_a_stop_is_held_back() -> None:
    finder = StopFinder(["STOP", "\n\n"])
    assert finder.feed("text S") == "text "
    assert finder.feed("T") == ""
    assert finder.feed("AR") == "STAR"
    assert finder.feed("\n") == ""
    assert finder.feed("x") == "\nx"
    assert finder.feed("a\n\nb") == "a"
    assert finder.matched == "\n\n"


def test_a_stop_that_repeats_its_own_start() -> None:
    finder = StopFinder(["aab"])
    assert [finder.feed(char) for char in "aaab"] == ["", "", "a", ""]
    assert finder.matched == "aab"


def test_without_stops_text_passes() -> None:
    assert StopFinder([]).feed("anything") == "anything"


def test_a_regular_expression_is_only_text() -> None:
    finder = StopFinder([re.escape("a.c"), "a.c"])
    assert finder.feed("abc a.c") == "abc "


def test_feeding_after_a_match_is_a_programming_error() -> None:
    finder = StopFinder(["a"])
    finder.feed("a")
    with pytest.raises(AssertionError):
        finder.feed("b")
