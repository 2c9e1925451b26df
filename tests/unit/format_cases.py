"""What the tests of formats share: an answer as the model writes it, what is in it, and the ways to
cut it into pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.deltas import Answer, Delta, join_deltas
from setpoint.frontend.chat.parser import DeltaParser, parse_answer

WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "celsius": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "options": {"type": "object"},
            "limit": {"type": "number"},
        },
        "required": ["city"],
    },
)
TIME = Tool("get_time", parameters={"type": "object", "properties": {"zone": {"type": "string"}}})
PING = Tool("ping")
TOOLS = (WEATHER, TIME, PING)

STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
HALF_ESCAPE = re.compile(r'"(?:[^\\]|\\.)*\\\Z', re.DOTALL)
"""Finds half an escape at the end of the string that is open, if one is."""


@dataclass(frozen=True)
class Case:
    """An answer of a model, and what a parser finds in it."""

    what: str
    raw: str
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments of each."""
    reasoning: str = ""


def found(raw: str, answer: Answer) -> Case:
    calls = tuple((call.name, call.arguments) for call in answer.calls)
    return Case("", raw, answer.text, calls, answer.reasoning)


def streamed(parser: DeltaParser, pieces: Iterable[str]) -> list[Delta]:
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return [*deltas, *parser.end()]


def cuts(text: str) -> Iterable[list[str]]:
    """Every cut into two, and one character at a time."""
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    yield list(text)


def summary(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Everything about an answer except ids that are drawn."""
    answer = join_deltas(deltas)
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "calls": [
            (
                call.index,
                call.name,
                call.arguments,
                call.is_cut,
                call.id if ":" in call.id else bool(call.id),
            )
            for call in answer.calls
        ],
    }


def check_stream(deltas: list[Delta]) -> None:
    """What holds for the deltas of any stream: no empty ones, calls in order, the name and the id in
    the first delta of a call, no argument that ends inside an escape."""
    begun = -1
    arguments = ""
    for delta in deltas:
        if not hasattr(delta, "index"):
            assert delta.text, "an empty delta"
        elif delta.index == begun:
            assert (delta.name, delta.id) == ("", "")
            assert delta.arguments or delta.is_cut, "an empty delta"
            arguments += delta.arguments
            assert not HALF_ESCAPE.search(STRINGS.sub("", arguments)), "half an escape"
        else:
            assert delta.index == begun + 1
            assert all((delta.name, delta.id))
            begun, arguments = delta.index, delta.arguments


def check_cuts(make: Any, raw: str) -> None:
    """However an answer is cut, the same is found in it."""
    whole = summary(parse_answer(make(), raw))
    for pieces in cuts(raw):
        deltas = streamed(make(), pieces)
        check_stream(deltas)
        assert summary(deltas) == whole, pieces
