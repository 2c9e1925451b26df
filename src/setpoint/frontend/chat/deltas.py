"""The parts of a chat's answer: pieces of text, of reasoning, and of tool calls. A parser
(``parser``) makes them from the text that a model generates; each API renders them in its own
shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class TextDelta(msgspec.Struct, frozen=True, tag="text"):
    """A piece of text for the user."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning"):
    """A piece of the model's reasoning before its answer."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True, tag="tool_call"):
    """A piece of a tool call. The first piece of a call has its id and name; the arguments of all
    pieces joined are a JSON text."""

    index: int
    """Index of the call in its answer, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_cut: bool = False
    """Whether the arguments are not complete, because the answer has ended inside this call, or
    the model has left it for another one; only the last delta of a call can say so."""


Delta = TextDelta | ReasoningDelta | ToolCallDelta


class Answer(msgspec.Struct, frozen=True):
    """Deltas put together, whether of a whole answer or of a piece."""

    text: str
    reasoning: str
    calls: list[ToolCallDelta]
    """The tool calls, their pieces joined, in the order in which they began."""


def join_deltas(deltas: Sequence[Delta]) -> Answer:
    """The deltas put together; the pieces of each call are joined."""
    # It runs for every piece of every stream, which is nearly always one piece of text.
    if len(deltas) == 1 and isinstance(deltas[0], TextDelta):
        return Answer(deltas[0].text, "", [])
    text: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        if isinstance(delta, TextDelta):
            text.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            reasoning.append(delta.text)
        else:
            calls.setdefault(delta.index, []).append(delta)
    return Answer("".join(text), "".join(reasoning), [_joined(each) for each in calls.values()])


def _joined(pieces: Sequence[ToolCallDelta]) -> ToolCallDelta:
    if len(pieces) == 1:
        return pieces[0]
    arguments = "".join([piece.arguments for piece in pieces])
    return msgspec.structs.replace(pieces[0], arguments=arguments, is_cut=pieces[-1].is_cut)


def num_whole_calls(calls: Sequence[ToolCallDelta]) -> int:
    """How many calls begin in these deltas, less one that is cut: over a whole answer, the number
    of calls that can be run."""
    return sum(bool(call.id) - call.is_cut for call in calls)


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a tool call as an object; {} if the text is not a JSON object, for example
    because the answer reached a limit in the middle of it."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
