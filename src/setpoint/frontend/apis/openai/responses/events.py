"""The output items of a response and the events of its stream, made from the deltas of the neutral
chat. A whole response is made of the same events, so it has what a stream of it would have had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from setpoint.frontend.apis.openai.responses.items import new_item_id
from setpoint.frontend.chat.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta

Event = dict[str, Any]

_TEXT_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}
"""Type of an item that holds text -> type of its one part, and the beginning of its events'
names."""


class OutputEvents:
    """The events between ``response.in_progress`` and the last one, without sequence numbers.

    An item of text begins with its first character that is no white space: models write line breaks
    between reasoning, text and calls.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        """The items so far, the last one perhaps unfinished; changed as events are made."""
        self._open: str | int | None = None
        """The item that has not ended: "message", "reasoning", or the index of a tool call."""
        self._text = ""
        """What the open item's deltas have said so far."""
        self._held = ""
        """White space that belongs to a message if other characters follow."""

    def feed(self, deltas: Iterable[Delta]) -> list[Event]:
        return [event for delta in deltas for event in self._events(delta)]

    def end(self, *, is_complete: bool) -> list[Event]:
        """The last events. is_complete: whether the model has ended by itself. An answer without
        anything else has a message, with the white space that the model may have written."""
        events = []
        if not self.items:
            events = [*self._begin("message", _message()), *self._more(self._held)]
        return [*events, *self._close("completed" if is_complete else "incomplete")]

    def _events(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case TextDelta(text):
                yield from self._add_text("message", text)
            case ReasoningDelta(text):
                yield from self._add_text("reasoning", text)
            case ToolCallDelta():
                yield from self._add_call(delta)

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            text = self._held + text if kind == "message" else text
            if not text.strip():
                self._held = text if kind == "message" else ""
                return
            yield from self._close("completed")
            yield from self._begin(kind, _message() if kind == "message" else _reasoning())
        yield from self._more(text)

    def _add_call(self, delta: ToolCallDelta) -> Iterator[Event]:
        if self._open != delta.index:
            yield from self._close("completed")
            yield from self._begin(delta.index, _call(delta))
        yield from self._more(delta.arguments)

    def _begin(self, kind: str | int, item: dict[str, Any]) -> Iterator[Event]:
        self._open, self._text, self._held = kind, "", ""
        self.items.append(item)
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": {**item},
        }
        if isinstance(kind, str):
            part = _part(_TEXT_TYPES[kind], "")
            yield self._event("content_part.added", content_index=0, part=part)

    def _more(self, text: str) -> Iterator[Event]:
        if text:
            self._text += text
            yield self._event(f"{self._name}.delta", **self._place, delta=text, **self._logprobs)

    def _close(self, status: str) -> Iterator[Event]:
        self._held = ""
        if self._open is None:
            return
        item, kind = {**self.items[-1], "status": status}, self._open
        if isinstance(kind, str):
            part = _part(_TEXT_TYPES[kind], self._text)
            item["content"] = [part]
            yield self._event(
                f"{self._name}.done", **self._place, text=self._text, **self._logprobs
            )
            yield self._event("content_part.done", content_index=0, part=part)
        else:
            item["arguments"] = self._text
            yield self._event(f"{self._name}.done", name=item["name"], arguments=self._text)
        self._open = None
        self.items[-1] = item
        yield {
            "type": "response.output_item.done",
            "output_index": len(self.items) - 1,
            "item": item,
        }

    @property
    def _name(self) -> str:
        """The beginning of the names of the open item's events."""
        return _TEXT_TYPES[self._open] if isinstance(self._open, str) else "function_call_arguments"

    @property
    def _place(self) -> dict[str, int]:
        return {"content_index": 0} if isinstance(self._open, str) else {}

    @property
    def _logprobs(self) -> dict[str, list[Any]]:
        return {"logprobs": []} if self._open == "message" else {}

    def _event(self, kind: str, /, **fields: Any) -> Event:
        return {
            "type": f"response.{kind}",
            "item_id": self.items[-1]["id"],
            "output_index": len(self.items) - 1,
            **fields,
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "output_text" else part


def _message() -> dict[str, Any]:
    return {
        "id": new_item_id("message"),
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }


def _reasoning() -> dict[str, Any]:
    return {
        "id": new_item_id("reasoning"),
        "type": "reasoning",
        "status": "in_progress",
        "summary": [],
        "content": [],
        "encrypted_content": None,
    }


def _call(delta: ToolCallDelta) -> dict[str, Any]:
    return {
        "id": new_item_id("function_call"),
        "type": "function_call",
        "status": "in_progress",
        "call_id": delta.id,
        "name": delta.name,
        "arguments": "",
    }
