"""Markers as tokens and as text: what is found does not depend on how a stream cuts the text."""

from __future__ import annotations

from typing import Any

import pytest
from format_cases import TOOLS, check_stream, summary
from hypothesis import given
from hypothesis import strategies as st

from setpoint.frontend.chat.deltas import Delta, join_deltas
from setpoint.frontend.chat.formats.format_registry import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format,
    tool_format,
)
from setpoint.frontend.chat.parser import PlainParser
from setpoint.frontend.chat.turn.token_markers import AnswerParser, token_markers
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint_testing.byte_tokenizer import make_byte_tokenizer

TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def parser() -> AnswerParser:
    form = tool_format("hermes")
    inner = reasoning_format("qwen3").parser(form.parser(TOOLS), starts_inside=False, calls=form)
    return AnswerParser(inner, TOKENS)


@given(st.data())
def test_any_mixture_cut_anywhere(data: st.DataObject) -> None:
    call = '{"name": "ping", "arguments": {"a": "<"}}'
    parts = data.draw(
        st.lists(
            st.sampled_from([*TOKENS, call, "<", "/", "think>", "tool_", " x", "\n"]), max_size=12
        )
    )
    text, marks = "", set()
    for part in parts:
        if part in TOKENS and data.draw(st.booleans()):
            marks.add(len(text))
        text += part
    at = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:stop] for start, stop in zip([0, *at], [*at, len(text)], strict=True)]
    one, deltas = parser(), list[Delta]()
    for piece in pieces:
        deltas += one.feed(piece, marks)
    deltas += one.end(marks)
    check_stream(deltas)
    assert summary(deltas) == summary(parser().whole(text, marks))
    if not marks:
        assert join_deltas(deltas).text.split() == text.split(), "nothing of it is a marker"


def test_what_is_guarded_comes_out_as_it_was_written() -> None:
    plain = AnswerParser(PlainParser(), TOKENS)
    text = "<think>\ufdd0</think> <tool_call"
    assert join_deltas(plain.whole(text, ())).text == text.replace("\ufdd0", "\ufffd")


@pytest.mark.parametrize("form", [*TOOL_FORMATS.values(), *REASONING_FORMATS.values()])
def test_each_format_finds_its_tokens(form: Any) -> None:
    """Tokens are found in markers, also in longer ones and in the headers of calls."""
    tokens = {
        "kimi_k2": "<|tool_call_argument_begin|>",
        "deepseekv31": "<｜tool▁sep｜>",
        "deepseekv32": "｜DSML｜",
        "mistral": "[ARGS]" if form in TOOL_FORMATS.values() else "[/THINK]",
        "gpt-oss": "<|channel|>",
        "lfm2": "<|tool_call_start|>",
        "step3": "<｜tool_sep｜>" if form in TOOL_FORMATS.values() else "</think>",
    }
    if form.name == "granite":
        return  # its markers are sentences
    token = tokens.get(form.name) or next(each for each in form.markers if each.strip())
    if form.name == "kimi_k2" and form not in TOOL_FORMATS.values():
        token = "</think>"
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens([token, "<other>"])
    assert token_markers(Tokenizer(tokenizer), form) == (token,)
