"""Parsing an answer is linear in its length, whatever it holds and however it is cut: four times
the text is four times the work. Work is counted in characters that are looked at or copied."""

from __future__ import annotations

import dataclasses
import random
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from counted_text import Work, counting
from format_cases import TOOLS

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.deltas import join_deltas
from setpoint.frontend.chat.formats.format_registry import REASONING_FORMATS, TOOL_FORMATS
from setpoint.frontend.chat.formats.xml_values import ANY, ArgumentTypes
from setpoint.frontend.chat.parser import DeltaParser, PlainParser, joining_reasoning

TEXTS = (
    *(
        "get_weather",
        "ping",
        "a",
        "city",
        "function",
        "call:",
        "to=functions.ping",
        " ",
        "\n",
        "  \n",
    ),
    *(
        '"',
        "'",
        "'''",
        "\\",
        "\\u",
        "\\ud83d",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ":",
        ",",
        "=",
        "<",
        ">",
    ),
    *(
        '{"name": "ping", "arguments": {',
        '{"name": "ping", "parameters": ',
        '"arguments": ',
        "ping(",
    ),
    *(
        '"name": "ping"',
        "analysis",
        "final",
        "json",
        "1",
        "null",
        "```json\n",
        "true",
        ":0",
        "[ARGS]",
    ),
)
NUM_CHARS, NUM_CHARS_OF_HARMONY = 1200, 5000
"""A multiple of what a parser holds back: a name, or a whole header of gpt-oss. Reasoning alone
needs half as many."""


def markers(form: Any) -> set[str]:
    """All texts that a format consists of."""
    found: set[str] = set()
    fields = dataclasses.fields(form) if dataclasses.is_dataclass(form) else ()
    for field in fields:
        value = getattr(form, field.name)
        found |= {value} if isinstance(value, str) else set()
        if isinstance(value, tuple):
            found |= {each for each in value if isinstance(each, str)}
    if form.name == "gpt-oss":
        found |= {"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"}
    return found - {""}


def make_calls(form: Any) -> DeltaParser:
    parser: DeltaParser = form.parser(TOOLS)
    return parser


def make_reasoning(form: Any) -> DeltaParser:
    make = joining_reasoning(lambda: form.parser(PlainParser(), starts_inside=False))
    return make()


def make_calls_in_reasoning(form: Any) -> DeltaParser:
    reasoning = REASONING_FORMATS["qwen3"]
    make = joining_reasoning(
        lambda: reasoning.parser(form.parser(TOOLS), starts_inside=True, calls=form)
    )
    return make()


def shapes(form: Any, count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Texts that are not repeated, repeated, and not repeated."""
    own, draw = sorted(markers(form)), random.Random(seed)

    def some(most: int) -> str:
        return "".join(
            draw.choice(own if draw.random() < 0.6 else TEXTS) for _ in range(draw.randint(0, most))
        )

    for marker in own:
        yield "", marker, ""
        yield "", marker[:-1] or "x", ""
    for _ in range(count):
        yield some(3), some(4) or "x", some(2)


def work_for(make: Any, form: Any, shape: tuple[str, str, str], size: int, cut: int) -> int:
    before, repeated, behind = shape
    with counting([form]) as work:
        text = before + repeated * (size // len(repeated)) + behind
        parser = make(form)
        deltas = [
            delta
            for at in range(0, len(text), cut)
            for delta in parser.feed(_counted(work, text[at : at + cut]))
        ]
        deltas += parser.end()
        join_deltas(deltas)
    return work.num_chars


def _counted(work: Work, text: str) -> str:
    return work.text(text)


def check(make: Any, form: Any, count: int, seed: int) -> None:
    size = NUM_CHARS_OF_HARMONY if form.name == "gpt-oss" else NUM_CHARS
    if make is make_reasoning:
        size //= 2
    for shape in shapes(form, count, seed):
        for cut in (1, 1 << 30):
            small = work_for(make, form, shape, size, cut)
            large = work_for(make, form, shape, 4 * size, cut)
            if large >= 5 * small + 4 * 2048:
                # What is read again while a header may go on has a limit, which a short text hardly
                # reaches. Behind it the work for a character is the same in any text.
                small, large = large, work_for(make, form, shape, 16 * size, cut)
            assert large < 5 * small + 4 * 2048, (shape, cut, small, large)


CALLS = {form.name: form for form in TOOL_FORMATS.values()}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    check(make_calls, CALLS[name], 3, 0)


@pytest.mark.full
@pytest.mark.parametrize("name", CALLS)
def test_calls_in_reasoning(name: str) -> None:
    check(make_calls_in_reasoning, CALLS[name], 3, 0)


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning(name: str) -> None:
    check(make_reasoning, REASONING_FORMATS[name], 1, 0)


@pytest.mark.full
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("seed", range(1, 20))
def test_calls_of_many_shapes(name: str, seed: int) -> None:
    check(make_calls, CALLS[name], 60, seed)


@pytest.mark.parametrize("name", CALLS)
def test_no_pattern_tries_a_part_at_every_length(name: str) -> None:
    """What patterns do with the short texts that they are tried on is not counted. Red before: a
    key of 300 characters was tried 300 ** 3 times."""
    form = CALLS[name]
    for field in dataclasses.fields(form) if dataclasses.is_dataclass(form) else ():
        value = getattr(form, field.name)
        if isinstance(value, re.Pattern):
            assert not re.search(r"[*+?}]\?", value.pattern), value.pattern


def test_the_types_of_an_argument_are_looked_for_once_and_not_everywhere() -> None:
    """Red before: ten to the power of eight schemas, and again for every argument."""
    again = {"anyOf": [{"$ref": "#/properties/a"}] * 10}
    tool = Tool("f", parameters={"type": "object", "properties": {"a": again}})
    calls = 0

    def count(frame: Any, kind: str, _: Any) -> None:
        nonlocal calls
        calls += kind == "call"

    types = ArgumentTypes()
    sys.setprofile(count)
    try:
        found = types.of(tool, "a")
        first, calls = calls, 0
        assert types.of(tool, "a") is found
    finally:
        sys.setprofile(None)
    assert found == ANY
    assert first < 2000
    assert calls == 1
