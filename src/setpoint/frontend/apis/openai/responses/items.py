"""Items of a conversation. This module checks the items of a request and converts them to the form
in which they are stored and listed, and converts the items of a whole conversation to the messages
of a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from setpoint.core.bounds import convert_field
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted
from setpoint.core.wording import kind_of
from setpoint.frontend.apis.openai.responses.response_tools import called_name
from setpoint.frontend.chat.passed_over import placeholder
from setpoint.frontend.new_ids import new_hex

Item = Mapping[str, Any]
Message = dict[str, Any]
Role = Literal["user", "assistant", "system", "developer"]

_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "local_shell_call": "lsh_",
    "local_shell_call_output": "lsho_",
    "shell_call": "sh_",
    "shell_call_output": "sho_",
    "apply_patch_call": "apc_",
    "apply_patch_call_output": "apco_",
    "reasoning": "rs_",
}
"""Type of an item -> the prefix of its ids."""
_OTHER_PREFIX = "item_"

_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
"""Type of a part -> the field with its text."""

Parts = str | list[Any]


class _Message(msgspec.Struct):
    role: Role
    content: Parts


class _Call(msgspec.Struct):
    """A call that the client runs; ``call`` returns the function call that the model wrote for
    it."""

    call_id: str

    def call(self, item: Item) -> tuple[str, str | dict[str, Any]]:
        """Name and arguments of the function, as the model sees them."""
        raise NotImplementedError


class _FunctionCall(_Call):
    name: str
    arguments: str
    namespace: str | None = None

    def call(self, item: Item) -> tuple[str, str | dict[str, Any]]:
        return called_name(item), self.arguments


class _CustomCall(_Call):
    name: str
    input: str
    namespace: str | None = None

    def call(self, item: Item) -> tuple[str, str | dict[str, Any]]:
        return called_name(item), {"input": self.input}


class _ActionCall(_Call):
    action: dict[str, Any]

    def call(self, item: Item) -> tuple[str, str | dict[str, Any]]:
        details = {key: value for key, value in self.action.items() if value and key != "type"}
        return str(item["type"]).removesuffix("_call"), details


class _PatchCall(_Call):
    operation: dict[str, Any]

    def call(self, item: Item) -> tuple[str, str | dict[str, Any]]:
        return "apply_patch", self.operation


class _Output(msgspec.Struct):
    call_id: str
    output: Parts

    def text(self, where: str) -> str:
        """The text of an output, whose other parts are named in it."""
        if isinstance(self.output, str):
            return self.output
        return _text_of(list(map(_as_text, self.output)), f"{where}.output")

    def passed_over(self) -> list[str]:
        """The types of the parts that are not text."""
        if isinstance(self.output, str):
            return []
        return [part["type"] for part in self.output if part is not _as_text(part)]


class _LocalShellOutput(msgspec.Struct, rename={"call_id": "id"}):
    """Its ``id`` is the id of the call."""

    call_id: str
    output: str

    def text(self, where: str) -> str:
        return self.output


class _ShellOutput(msgspec.Struct):
    call_id: str
    output: list[dict[str, Any]]

    def text(self, where: str) -> str:
        return msgspec.json.encode(self.output).decode()


class _PatchOutput(msgspec.Struct):
    call_id: str
    status: str
    output: str | None = None

    def text(self, where: str) -> str:
        return f"{self.status}\n{self.output or ''}".strip()


class _Reasoning(msgspec.Struct):
    summary: list[Any] = []
    content: list[Any] | None = None


_KINDS: Mapping[str, type[msgspec.Struct]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _Output,
    "custom_tool_call": _CustomCall,
    "custom_tool_call_output": _Output,
    "local_shell_call": _ActionCall,
    "local_shell_call_output": _LocalShellOutput,
    "shell_call": _ActionCall,
    "shell_call_output": _ShellOutput,
    "apply_patch_call": _PatchCall,
    "apply_patch_call_output": _PatchOutput,
    "reasoning": _Reasoning,
}


_AnyOutput = _Output | _LocalShellOutput | _ShellOutput | _PatchOutput


def new_item_id(kind: str) -> str:
    return f"{_PREFIXES.get(kind, _OTHER_PREFIX)}{new_hex('item')}"


def items_of(given: str | Sequence[Any], find: Callable[[str], Item | None]) -> list[Item]:
    """The ``input`` of a request as items with a type and an id. find: returns the item that an
    ``item_reference`` names. An item of a type that this server does not know is kept as it is.
    Raises RequestError (400, or 404 for a reference to an unknown item); the message names the item
    and its field."""
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
    if not isinstance(kind, str):
        raise RequestError(
            f"{where}.type must be one of {', '.join(_KINDS)}, item_reference; got {kind_of(kind)}."
        )
    own_id = raw.get("id")
    item = {**raw, "type": kind, "id": own_id if _is_name(own_id) else new_item_id(kind)}
    if kind not in _KINDS:
        return item
    checked = convert_field(raw, _KINDS[kind], where)
    if isinstance(checked, _Message):
        item["content"] = _parts(checked.content, f"{where}.content", checked.role)
        item.setdefault("status", "completed")
    elif isinstance(checked, _AnyOutput):
        checked.text(where)
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
            f" {quoted(item_id, 64)}. Send the item itself.",
            status_code=404,
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
            got = quoted(kind, 64) if isinstance(kind, str) else kind_of(part)
            raise RequestError(
                f"{where}[{index}]: this model reads only text parts, such as"
                f' {{"type": "input_text", "text": "…"}}; got {got}.'
            )
        texts.append(text)
    return " ".join(texts)


def _as_text(part: Any) -> Any:
    """A part of a tool's output as a part of text."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind in _TEXTS:
        return part
    return {"type": "text", "text": placeholder(kind)}


def messages_of(
    instructions: str | None,
    earlier: Sequence[Item],
    inputs: Sequence[Item],
    passed_over: list[str],
) -> list[Message]:
    """A conversation in the form that chat templates expect. Everything that the model has said
    between two turns of others (reasoning, text, calls) is one message. Items of types that this
    server does not know, such as those of a provider's own tools, and parts of outputs that are not
    text are passed over; ``passed_over`` gets their types. Raises RequestError (400)
    for an output that belongs to no call, and for a conversation without any question."""
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    known_calls: dict[str, str] = {}
    """Id of a call or of its item -> id of the call."""
    for index, item in enumerate([*earlier, *inputs]):
        where = f"input[{index - len(earlier)}]"
        if item["type"] not in _KINDS:
            passed_over.append(item["type"])
            continue
        checked = convert_field(item, _KINDS[item["type"]], where)
        if isinstance(checked, _AnyOutput):
            call_id = known_calls.get(checked.call_id)
            if call_id is None:
                raise RequestError(
                    f"{where}.call_id is {quoted(checked.call_id, 64)}, but no earlier call has"
                    " that id."
                )
            content = checked.text(where)
            if isinstance(checked, _Output):
                passed_over += checked.passed_over()
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif isinstance(checked, _Message) and checked.role != "assistant":
            messages.append({"role": checked.role, "content": _text_of(checked.content, where)})
        else:
            if isinstance(checked, _Call):
                known_calls |= dict.fromkeys((item["id"], checked.call_id), checked.call_id)
            _add_to_turn(messages, item, checked)
    for turn in messages:
        for key in ("content", "reasoning_content"):
            if isinstance(turn.get(key), list):
                turn[key] = "\n".join(filter(None, turn[key]))
    if not any(message["role"] in ("user", "tool") for message in messages):
        raise RequestError("input must have at least one user message or output of a call.")
    return messages


def _add_to_turn(messages: list[Message], item: Item, checked: msgspec.Struct) -> None:
    """Add an item of the model to its current message, or begin a new one. The message collects its
    texts in lists: a body may have 20,000 items, and to copy the text for each one would take
    seconds."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    turn = messages[-1]
    if isinstance(checked, _Message):
        turn["content"].append(_text_of(checked.content, "content"))
    elif isinstance(checked, _Call):
        name, arguments = checked.call(item)
        function = {"name": name, "arguments": arguments}
        call = {"id": checked.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        # Reasoning of another provider is encrypted, and this server cannot read it.
        parts = item.get("content") or item.get("summary") or []
        if text := _text_of(parts, "content"):
            turn.setdefault("reasoning_content", []).append(text)
