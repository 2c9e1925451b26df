"""Makes the content blocks of an answer from the parts of the neutral chat's answer, as the events
of a stream. The events can also be combined into the blocks of a whole message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from setpoint.frontend.chat.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    arguments_of,
    num_whole_calls,
)

Event = dict[str, Any]

SIGNATURE = "setpoint"
"""The signature of every thinking block. It proves nothing and is not checked when a client sends
the block back, but clients throw blocks without one away."""


class BlockEvents:
    """Makes the events of one message's blocks. A block of text or thinking begins with its first
    character that is not white space, because models write line breaks between thinking, text and
    calls."""

    def __init__(self, *, show_thinking: bool = True) -> None:
        """show_thinking: whether thinking blocks have their text."""
        self._show_thinking = show_thinking
        self._index = -1
        """Index of the block that began last."""
        self._open: str | int | None = None
        """The block that has not ended: "text", "thinking", or the index of a tool call."""
        self._held = ""
        """White space that becomes part of a block if other characters follow."""
        self._held_kind = ""
        self.num_calls = 0
        """The number of calls, less one that is cut."""

    def feed(self, deltas: Iterable[Delta]) -> list[Event]:
        return [event for delta in deltas for event in self._events(delta)]

    def end(self) -> list[Event]:
        return list(self._close())

    def _events(self, delta: Delta) -> Iterator[Event]:
        if isinstance(delta, ToolCallDelta):
            yield from self._call(delta)
        elif isinstance(delta, TextDelta):
            yield from self._text("text", delta.text)
        else:
            assert isinstance(delta, ReasoningDelta)
            yield from self._text("thinking", delta.text)

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            text = (self._held if self._held_kind == kind else "") + text
            if not text.strip():
                self._held, self._held_kind = text, kind
                return
            yield from self._close()
            yield self._start(kind, {"type": kind, kind: ""} | _unsigned(kind))
        self._held = ""
        if kind == "text" or self._show_thinking:
            yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, delta: ToolCallDelta) -> Iterator[Event]:
        self.num_calls += num_whole_calls([delta])
        if self._open != delta.index:
            yield from self._close()
            yield self._start(
                delta.index,
                {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}},
            )
        if delta.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})

    def _start(self, kind: str | int, block: dict[str, Any]) -> Event:
        self._open = kind
        self._index += 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Event]:
        self._held = ""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}


def _unsigned(kind: str) -> dict[str, str]:
    return {"signature": ""} if kind == "thinking" else {}


def blocks_of(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The content of a whole message. A call whose JSON is incomplete, because the answer reached a
    limit, has an empty input."""
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            pieces = []
        elif event["type"] == "content_block_stop":
            _complete(blocks[-1], "".join(pieces))
        else:
            delta = event["delta"]
            if "signature" in delta:
                blocks[-1]["signature"] = delta["signature"]
            else:
                pieces.append(next(value for key, value in delta.items() if key != "type"))
    return blocks


def _complete(block: dict[str, Any], text: str) -> None:
    """Put the joined deltas of a block into it."""
    if block["type"] != "tool_use":
        block[block["type"]] = text
        return
    block["input"] = arguments_of(text)
