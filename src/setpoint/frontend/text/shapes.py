"""Which shapes of a message a chat template can read: text in parts, or joined; a call's arguments
as an object, or as JSON text.

Nothing in a template says so. It is found by rendering a small conversation with each shape, once,
when the first conversation needs to know.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from setpoint.core.errors import RequestError

Arguments = Literal["object", "text", "either"]
"""How a template reads the arguments of a call: only as an object, only as JSON text, or both."""
Render = Callable[[Sequence[Mapping[str, Any]]], Awaitable[str]]

_TEXTS = ("first-probe", "second-probe")
_AS_DATA = re.compile(r"""['"]text['"]\s*:\s*['"]""" + _TEXTS[0])
"""A part written as JSON or as Python writes it: the template did not read it as text."""
_ARGUMENTS = {"probe": "value"}
_ARGUMENTS_AS_TEXT = '{"probe": "value"}'
_AS_PYTHON = re.compile(r"\{'probe'")

_ASK = {"role": "user", "content": "question"}


class TemplateShapes:
    def __init__(self, render: Render) -> None:
        """render: renders messages; raises RequestError for those that the template refuses."""
        self._render = render
        self._parts: dict[str, bool] = {}
        self._arguments: Arguments | None = None

    async def reads_parts(self, role: str) -> bool:
        """Whether the template reads the content of this role's messages as a list of parts of
        text."""
        known = self._parts.get(role)
        if known is None:
            parts = [{"type": "text", "text": text} for text in _TEXTS]
            shown = await self._shown(_conversation(role, parts))
            is_read = all(text in shown for text in _TEXTS) and not _AS_DATA.search(shown)
            known = self._parts[role] = is_read
        return known

    async def reads_arguments(self) -> Arguments:
        if self._arguments is None:
            as_object = await self._shown(_called(_ARGUMENTS))
            as_text = await self._shown(_called(_ARGUMENTS_AS_TEXT))
            is_read = "probe" in as_object and not _AS_PYTHON.search(as_object)
            if not is_read and _ARGUMENTS_AS_TEXT in as_text:
                self._arguments = "text"
            else:
                self._arguments = "either" if as_text else "object"
        return self._arguments

    async def _shown(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What the template makes of the messages; "" if it refuses them."""
        try:
            return await self._render(messages)
        except RequestError:
            return ""


def _conversation(role: str, content: Any) -> list[Mapping[str, Any]]:
    """A conversation with a message of this role and content."""
    message = {"role": role, "content": content}
    match role:
        case "user":
            return [message]
        case "assistant":
            return [_ASK, message, _ASK]
        case "tool":
            call = _called(_ARGUMENTS)
            return [*call, {**message, "tool_call_id": "callprobe", "name": "tool"}]
    return [message, _ASK]


def _called(arguments: Any) -> list[Mapping[str, Any]]:
    function = {"name": "tool", "arguments": arguments}
    # Nine letters, because some templates insist on the length.
    call = {"id": "callprobe", "type": "function", "function": function}
    return [_ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
