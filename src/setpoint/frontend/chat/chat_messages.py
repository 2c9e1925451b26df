"""Checks the history of a conversation and brings it into the form that chat templates are written
for: every content a string or a list of parts of text, the arguments of every tool call an
object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from setpoint.core.conversion import convert
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted
from setpoint.core.wording import kind_of
from setpoint.frontend.chat.passed_over import placeholder

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(
    messages: Sequence[Mapping[str, Any]], passed_over: list[str]
) -> list[dict[str, Any]]:
    """The messages for a template. Parts of a tool's result that are not text are replaced by a
    text that says so; ``passed_over`` gets their types. Raises RequestError (400) that names the
    message and its field, for an unknown role, for other content that is not text, for a tool's
    result without a call before it, and for a conversation in which nobody has asked anything yet.

    Arguments that are no JSON object are left as the text that they are: a model may have written
    them, and the conversation must be able to go on.
    """
    if not messages:
        raise RequestError("messages must not be empty.")
    known_calls: set[str] = set()
    flat = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(
                f"{where} must be an object with role and content, got {kind_of(message)}."
            )
        role = _role_of(message, where)
        # Clients send back what they got, nulls included; templates ask whether a key is there.
        made = {key: value for key, value in message.items() if value is not None}
        content = message.get("content")
        if role == "tool" and isinstance(content, list):
            content = [_as_text_part(part, passed_over) for part in content]
        made["content"] = _content_of(content, where, role)
        made.pop("tool_calls", None)
        if role == "assistant":
            made |= _reasoning(message) | _called(message, where)
            known_calls.update(call["id"] for call in made.get("tool_calls", ()))
        elif message.get("tool_calls"):
            raise RequestError(
                f"{where}.tool_calls: only messages of the assistant may have tool_calls."
            )
        elif role == "tool":
            _check_result(message, where, known_calls)
        flat.append(made)
    if not any(message["role"] in ("user", "tool") for message in flat):
        raise RequestError("messages must have at least one user message or tool result.")
    return flat


def _role_of(message: Mapping[str, Any], where: str) -> str:
    role = message.get("role")
    if isinstance(role, str) and role in ROLES:
        return role
    got = quoted(role, 64) if isinstance(role, str) else kind_of(role)
    raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}; got {got}.")


def _content_of(content: Any, where: str, role: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if role == "assistant" and (content is None or content == []):
        return ""
    if content is None:
        raise RequestError(f"{where}.content is missing.")
    if not isinstance(content, list):
        raise RequestError(
            f"{where}.content must be a string or a list of parts, got {kind_of(content)}."
        )
    if not content:
        raise RequestError(f"{where}.content must not be an empty list.")
    return [{"type": "text", "text": _part_text(part, where)} for part in content]


def _as_text_part(part: Any, passed_over: list[str]) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind in ("text", "refusal"):
        return part
    passed_over.append(kind)
    return {"type": "text", "text": placeholder(kind)}


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "refusal") and isinstance(part.get(kind), str):
        text: str = part[kind]
        return text
    got = quoted(kind, 64) if isinstance(kind, str) else kind_of(part)
    raise RequestError(f"{where}.content: this model reads text parts only, got {got}.")


def as_text(content: str | Sequence[Mapping[str, str]]) -> str:
    """The content of a message as one text, its parts joined as SGLang joins them."""
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)


_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def _reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The reasoning of an earlier answer, under the names by which templates read it. Clients send
    it under any of three names."""
    found = (message.get(key) for key in _REASONING_KEYS)
    reasoning = next((text for text in found if isinstance(text, str)), None)
    if reasoning is None:
        return {}
    return {"thinking": message.get("thinking") or reasoning, "reasoning_content": reasoning}


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""


def _called(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The ``tool_calls`` of an assistant's message, as templates read them; {} without any."""
    if message.get("function_call"):
        raise RequestError(f"{where}.function_call is OpenAI's older form; use tool_calls.")
    if not message.get("tool_calls"):
        return {}
    if not isinstance(message["tool_calls"], list):
        got = kind_of(message["tool_calls"])
        raise RequestError(f"{where}.tool_calls must be a list, got {got}.")
    made = []
    for index, raw in enumerate(message["tool_calls"]):
        try:
            call = convert(raw, _Call)
        except msgspec.ValidationError:
            raise RequestError(
                f"{where}.tool_calls[{index}] must be an object like"
                ' {"id": "call_1", "type": "function", "function": {"name": "f", "arguments":'
                ' "{}"}}.'
            ) from None
        function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
        made.append({"id": call.id, "type": "function", "function": function})
    return {"tool_calls": made}


def _arguments(value: str | dict[str, Any] | None) -> str | dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return value


def _check_result(message: Mapping[str, Any], where: str, known_calls: set[str]) -> None:
    """Raise RequestError (400) for a result that belongs to no call. Without ``tool_call_id`` it
    belongs to the calls before it, in their order."""
    call_id = message.get("tool_call_id")
    if call_id is not None and not isinstance(call_id, str):
        raise RequestError(f"{where}.tool_call_id must be a string, got {kind_of(call_id)}.")
    if not known_calls:
        raise RequestError(
            f"{where} is the result of a tool, but no earlier message of the assistant has"
            " tool_calls."
        )
    if call_id and call_id not in known_calls:
        raise RequestError(
            f"{where}.tool_call_id is {quoted(call_id, 64)}, but no earlier call has that id."
        )
