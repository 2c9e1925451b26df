"""What an answer of a chat is made of: pieces of text, of reasoning, and of calls of tools.

A parser (``parser``) makes them of the text that a model generates; each API renders them in its
own shape.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class TextDelta(msgspec.Struct, frozen=True, tag="text"):
    """A piece of what the user is meant to read."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning"):
    """A piece of what the model thought before it answered."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True, tag="tool_call"):
    """A piece of a call: the first of a call has its id and name, and every piece continues the
    arguments, which are a JSON text when they are joined."""

    index: int
    """Of the call in its answer, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""


Delta = TextDelta | ReasoningDelta | ToolCallDelta


class Answer(msgspec.Struct, frozen=True):
    """Deltas put together, whether of a whole answer or of a piece."""

    text: str
    reasoning: str
    calls: list[ToolCallDelta]
    """The pieces of each call joined, in the order in which the calls began."""


def gathered(deltas: Iterable[Delta]) -> Answer:
    # One pass: it runs for every piece of every stream.
    text = reasoning = ""
    calls: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        if isinstance(delta, TextDelta):
            text += delta.text
        elif isinstance(delta, ReasoningDelta):
            reasoning += delta.text
        else:
            begun = calls.get(delta.index)
            calls[delta.index] = (
                delta
                if begun is None
                else msgspec.structs.replace(begun, arguments=begun.arguments + delta.arguments)
            )
    return Answer(text, reasoning, list(calls.values()))
