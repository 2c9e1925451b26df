"""Items of a conversation: those of a request are checked and brought into the form in which they
are kept and listed, and the items of a whole conversation become the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from setpoint.core.bounds import converted
from setpoint.core.errors import RequestError
from setpoint.core.shown import shown
from setpoint.core.wording import kind_of
from setpoint.frontend.intake import new_rid

Item = Mapping[str, Any]
Message = dict[str, Any]
Role = Literal["user", "assistant", "system", "developer"]

_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}
"""Type of an item -> how its ids begin. Other types are refused."""

_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
"""Type of a part -> its field with the text."""

Parts = str | list[Any]


class _Message(msgspec.Struct):
    role: Role
    content: Parts


class _Call(msgspec.Struct):
    call_id: str
    name: str
    arguments: str


class _CallOutput(msgspec.Struct):
    call_id: str
    output: Parts


class _Reasoning(msgspec.Struct):
    summary: list[Any] = []
    content: list[Any] | None = None


_KINDS: Mapping[str, type[msgspec.Struct]] = {
    "message": _Message,
    "function_call": _Call,
    "function_call_output": _CallOutput,
    "reasoning": _Reasoning,
}


def new_item_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}{new_rid()}"


def items_of(given: str | Sequence[Any], find: Callable[[str], Item | None]) -> list[Item]:
    """The ``input`` of a request as items with a type and an id. find: gives the item that an
    ``item_reference`` names. Raises RequestError that names the item and its field: 400, or 404 for
    a reference to nothing."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise RequestError("input must not be empty.")
    return [_item(raw, f"input[{index}]", find) for index, raw in enumerate(given)]


def _item(raw: Any, where: str, find: Callable[[str], Item | None]) -> Item:
    if not isinstance(raw, Mapping):
        raise RequestError(f"{where} must be an object, got {kind_of(raw)}.")
    kind = raw.get("type") or ("message" if "role" in raw else None)
    if kind == "item_reference":
        return _referred(raw.get("id"), where, find)
    if not isinstance(kind, str) or kind not in _KINDS:
        got = repr(shown(kind, 64)) if isinstance(kind, str) else kind_of(kind)
        raise RequestError(
            f"{where}.type must be one of {', '.join(_KINDS)}, item_reference; got {got}. This"
            " server runs no tools itself and reads text only."
        )
    checked = converted(raw, _KINDS[kind], where)
    own_id = raw.get("id")
    item = {**raw, "type": kind, "id": own_id if _is_name(own_id) else new_item_id(kind)}
    if isinstance(checked, _Message):
        item["content"] = _parts(checked.content, f"{where}.content", checked.role)
        item.setdefault("status", "completed")
    elif isinstance(checked, _CallOutput):
        _text_of(checked.output, f"{where}.output")
    elif isinstance(checked, _Reasoning):
        _text_of(checked.summary, f"{where}.summary")
        _text_of(checked.content or [], f"{where}.content")
    return item


def _referred(item_id: Any, where: str, find: Callable[[str], Item | None]) -> Item:
    if not isinstance(item_id, str):
        raise RequestError(f"{where}.id must be a string, got {kind_of(item_id)}.")
    item = find(item_id)
    if item is None:
        raise RequestError(
            f"{where}.id: this server stores no response with the output item"
            f" {shown(item_id, 64)!r}. Send the item itself.",
            status_code=404,
            err_type="invalid_request_error",
        )
    return item


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 256


def _parts(content: Parts, where: str, role: Role) -> list[Any]:
    """The content of a message as a list of parts."""
    if isinstance(content, str):
        kind = "output_text" if role == "assistant" else "input_text"
        return [{"type": kind, "text": content}]
    if not content and role != "assistant":
        raise RequestError(f"{where} must not be an empty list.")
    _text_of(content, where)
    return content


def _text_of(content: Parts, where: str) -> str:
    """The text of parts. Raises RequestError (400) for a part that is not text."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        field = _TEXTS.get(kind) if isinstance(kind, str) else None
        text = part.get(field) if field else None
        if not isinstance(text, str):
            got = repr(shown(kind, 64)) if isinstance(kind, str) else kind_of(part)
            raise RequestError(
                f"{where}[{index}]: this model reads text parts only, such as"
                f' {{"type": "input_text", "text": "…"}}; got {got}.'
            )
        texts.append(text)
    return " ".join(texts)


def messages_of(
    instructions: str | None, earlier: Sequence[Item], inputs: Sequence[Item]
) -> list[Message]:
    """A conversation in the form that chat templates are written for. What the model has said
    between two turns of others (reasoning, text, calls) is one message. Raises RequestError (400)
    for an output that belongs to no call, and if nobody has asked anything."""
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    known_calls: set[str] = set()
    for index, item in enumerate([*earlier, *inputs]):
        where = f"input[{index - len(earlier)}]"
        kind = item["type"]
        if kind == "function_call_output":
            if item["call_id"] not in known_calls:
                raise RequestError(
                    f"{where}.call_id is {shown(item['call_id'], 64)!r}, but no earlier"
                    " function_call has that id."
                )
            content = _text_of(item["output"], where)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _text_of(item["content"], where)})
        else:
            if kind == "function_call":
                known_calls.add(item["call_id"])
            _add_to_turn(messages, item)
    for turn in messages:
        for key in ("content", "reasoning_content"):
            if isinstance(turn.get(key), list):
                turn[key] = "\n".join(filter(None, turn[key]))
    if not any(message["role"] in ("user", "tool") for message in messages):
        raise RequestError("input must have at least one user message or function_call_output.")
    return messages


def _add_to_turn(messages: list[Message], item: Item) -> None:
    """Add something that the model has said to its message, which it begins if it is the first. Its
    texts are lists here: a body may have 20,000 items, and to copy the text for each takes
    seconds."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    turn = messages[-1]
    if item["type"] == "message":
        turn["content"].append(_text_of(item["content"], "content"))
    elif item["type"] == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        # A reasoning of another provider is encrypted; nobody here can read it.
        parts = item.get("content") or item.get("summary") or []
        if text := _text_of(parts, "content"):
            turn.setdefault("reasoning_content", []).append(text)
