"""Makes the output items of a response and the events of its stream from the deltas of the neutral
chat. A whole response is made from the same events, so it has the same content as a stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from setpoint.frontend.apis.openai.responses.custom_input import CustomInput
from setpoint.frontend.apis.openai.responses.items import new_item_id
from setpoint.frontend.apis.openai.responses.response_tools import ClientTool, Toolbox
from setpoint.frontend.chat.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta

Event = dict[str, Any]

_TEXT_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}
"""Type of an item that holds text -> type of its only part, and prefix of the names of its
events."""


class OutputEvents:
    """Makes the events between ``response.in_progress`` and the last one, without sequence numbers.

    An item of text begins with its first character that is not white space, because models write
    line breaks between reasoning, text and calls.
    """

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self.items: list[dict[str, Any]] = []
        """The items so far; the last one may be unfinished and changes with each event."""
        self._open: str | int | None = None
        """The item that has not ended: "message", "reasoning", or the index of a tool call."""
        self._text = ""
        """The joined deltas of the open item so far."""
        self._call: _OpenCall
        """The open call, if a call is open."""
        self._held = ""
        """White space that belongs to a message if other characters follow."""

    def feed(self, deltas: Iterable[Delta]) -> list[Event]:
        return [event for delta in deltas for event in self._events(delta)]

    def end(self, *, is_complete: bool) -> list[Event]:
        """The last events. is_complete: whether nothing has cut the text off; a call knows that
        itself. An otherwise empty answer gets a message, with the white space that the model may
        have written."""
        events = []
        if not self.items and self._open is None:
            events = [*self._begin("message", _message()), *self._more(self._held)]
        if self._open is not None and not isinstance(self._open, str):
            is_complete = not self._call.is_cut
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
            self._call = _OpenCall(delta, self._toolbox.called(delta.name))
            if self._call.is_held:
                self._open, self._held = delta.index, ""
            else:
                yield from self._begin(delta.index, self._call.item())
        self._call.is_cut = delta.is_cut
        yield from self._more(self._call.feed(delta.arguments))

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
        kind = self._open
        if not isinstance(kind, str):
            yield from self._end_call(kind)
        item = {**self.items[-1], "status": status}
        if isinstance(kind, str):
            part = _part(_TEXT_TYPES[kind], self._text)
            item["content"] = [part]
            yield self._event(
                f"{self._name}.done", **self._place, text=self._text, **self._logprobs
            )
            yield self._event("content_part.done", content_index=0, part=part)
        elif self._call.field:
            item[self._call.field] = self._text
            named = {"name": item["name"]} if item["type"] == "function_call" else {}
            yield self._event(f"{self._name}.done", **named, **{self._call.field: self._text})
        self._open = None
        self.items[-1] = item
        yield {
            "type": "response.output_item.done",
            "output_index": len(self.items) - 1,
            "item": item,
        }

    def _end_call(self, index: int) -> Iterator[Event]:
        """The remaining events of the open call before its last ones."""
        if self._call.is_held:
            yield from self._begin(index, self._call.item())
        yield from self._more(self._call.end())

    @property
    def _name(self) -> str:
        """The prefix of the names of the open item's events."""
        if isinstance(self._open, str):
            return _TEXT_TYPES[self._open]
        item = self.items[-1]["type"]
        return f"{item}_{self._call.field}"

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


class _OpenCall:
    """A call of the model while its arguments arrive."""

    def __init__(self, delta: ToolCallDelta, tool: ClientTool | None) -> None:
        """tool: the tool that it names; None if no tool has this name."""
        self._call_id = delta.id
        self._tool = tool
        self._name = delta.name if tool is None else tool.name
        self._input = CustomInput() if tool is not None and tool.kind == "custom" else None
        self._arguments = ""
        self.is_cut = False
        """Whether the answer has ended inside the call."""
        self.is_held = tool is not None and tool.item is not None
        """Whether its item can be made only when the arguments are complete."""
        self.field = "arguments" if self._input is None else "input"
        """The field of the item that holds the joined deltas; "" if there are no deltas."""

    def feed(self, arguments: str) -> str:
        """Add a piece of the arguments; returns the text of the item's delta."""
        if self._input is not None:
            return self._input.feed(arguments)
        self._arguments += arguments
        return "" if self.is_held else arguments

    def end(self) -> str:
        """The text of the last delta."""
        if self._input is not None:
            return self._input.end()
        return self._arguments if self.is_held and self.field else ""

    def item(self) -> dict[str, Any]:
        """The item at its beginning. Complete arguments that do not fit the tool become a function
        call, so that the client sees what the model wrote."""
        tool = self._tool
        kind, fields = "function_call", self._named("arguments")
        if self._input is not None:
            kind, fields = "custom_tool_call", self._named("input")
        elif tool is not None and tool.item is not None:
            with suppress(msgspec.DecodeError, RecursionError):
                kind, fields, self.field = f"{tool.kind}_call", tool.item(self._arguments), ""
        return {
            "id": new_item_id(kind),
            "type": kind,
            "status": "in_progress",
            "call_id": self._call_id,
            **fields,
        }

    def _named(self, field: str) -> dict[str, Any]:
        namespace = self._tool.namespace if self._tool is not None else ""
        return {**({"namespace": namespace} if namespace else {}), "name": self._name, field: ""}
