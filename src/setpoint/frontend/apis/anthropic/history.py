"""Converts Anthropic's messages and system prompt to the form that chat templates expect: one
message for each tool result, and content that is a string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from setpoint.core.bounds import convert_field
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted
from setpoint.core.wording import kind_of
from setpoint.frontend.chat.passed_over import placeholder

Message = dict[str, Any]
Role = Literal["system", "user", "assistant"]
T = TypeVar("T")

_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
"""A line that Claude Code puts before its system prompt. It is for Anthropic's billing and differs
in every request, so it would make the prefix cache useless."""


class TextBlock(msgspec.Struct):
    text: str


class ThinkingBlock(msgspec.Struct):
    thinking: str


class RedactedThinkingBlock(msgspec.Struct):
    data: str


class ToolUseBlock(msgspec.Struct):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct):
    tool_use_id: str | None = None
    id: str | None = None
    """Some older clients send this instead of ``tool_use_id``."""
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
Kinds = Mapping[str, type[Block]]


_TEXT: Kinds = {"text": TextBlock}
_KINDS: Mapping[str, Kinds] = {
    "system": _TEXT,
    "user": {**_TEXT, "tool_result": ToolResultBlock},
    "assistant": {
        **_TEXT,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
    },
}
"""Role -> the types of blocks that its messages may have."""


def history_of(
    system: str | Sequence[Mapping[str, Any]] | None,
    messages: Sequence[Mapping[str, Any]],
    passed_over: list[str],
) -> list[Message]:
    """The conversation for a chat template. Blocks of the assistant that this server does not know,
    such as those of Anthropic's own tools, and blocks of a tool's result that are not text are
    passed over; ``passed_over`` gets their types. Raises RequestError (400) for a block of the user
    that is not text, and a tool result without its call; the message names the message and the
    block."""
    if not messages:
        raise RequestError("messages must not be empty.")
    said: list[Message] = []
    text = _joined_text(_without_billing(text) for text in _texts(system or "", "system"))
    if text:
        said.append({"role": "system", "content": text})
    known_calls: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in _KINDS:
            got = quoted(role, 64) if isinstance(role, str) else kind_of(role)
            raise RequestError(f"{where}.role must be user, assistant or system; got {got}.")
        content = message.get("content")
        if role == "assistant":
            content = _readable(content, passed_over)
        blocks = _blocks(content, f"{where}.content", _KINDS[role])
        made = (
            [_assistant(blocks, known_calls)]
            if role == "assistant"
            else _request_messages(role, blocks, f"{where}.content", known_calls, passed_over)
        )
        said += made
    history = _turns(said)
    if history[-1].get("tool_calls"):
        raise RequestError(
            f"messages[{len(messages) - 1}] calls tools, so a user message with their results"
            " must follow it."
        )
    return history


def _turns(messages: Sequence[Message]) -> list[Message]:
    """The messages, with consecutive messages of the user, or of the assistant, joined into one."""
    turns: list[list[Message]] = []
    for message in messages:
        last = turns[-1][-1] if turns else {}
        if last.get("role") == message["role"] != "tool" and not last.get("tool_calls"):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_turn(turn) for turn in turns]


def _turn(messages: Sequence[Message]) -> Message:
    turn: Message = {}
    for message in messages:
        turn |= message
    # The texts are joined only once: a body may have 20,000 messages, and to copy the text for each
    # one would take seconds.
    for key in turn.keys() & {"content", "reasoning_content"}:
        turn[key] = _joined_text(message.get(key) for message in messages)
    return turn


def _assistant(blocks: Sequence[Block], known_calls: set[str]) -> Message:
    """The message of the model. Redacted thinking is left out, because no model of this server can
    read it."""
    message: Message = {
        "role": "assistant",
        "content": _joined_text(block.text for block in blocks if isinstance(block, TextBlock)),
    }
    thinking = _joined_text(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if thinking:
        message["reasoning_content"] = thinking
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        known_calls.update(call.id for call in calls)
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.input},
            }
            for call in calls
        ]
    return message


def _request_messages(
    role: str,
    blocks: Sequence[Block],
    where: str,
    known_calls: set[str],
    passed_over: list[str],
) -> list[Message]:
    """The messages of the user, the tools or the operator, in the order of the blocks."""
    messages: list[Message] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            messages.append(_result(block, f"{where}[{index}]", known_calls, passed_over))
        elif isinstance(block, TextBlock):
            messages.append({"role": role, "content": block.text})
    return messages


def _result(
    block: ToolResultBlock, where: str, known_calls: set[str], passed_over: list[str]
) -> Message:
    name = "id" if block.tool_use_id is None and block.id is not None else "tool_use_id"
    call_id: str | None = getattr(block, name)
    if call_id is None:
        raise RequestError(f"{where}.tool_use_id is missing.")
    if call_id not in known_calls:
        raise RequestError(
            f"{where}.{name} is {quoted(call_id, 64)}, but no earlier tool_use block has that id."
        )
    content = block.content or ""
    if not isinstance(content, str):
        content = [_as_text(part, passed_over) for part in content]
    text = _joined_text(_texts(content, f"{where}.content"))
    return {
        "role": "tool",
        "tool_call_id": call_id,
        "content": f"Error: {text}" if block.is_error else text,
    }


def _readable(content: Any, passed_over: list[str]) -> Any:
    """The content of a message of the assistant without the blocks that this server does not know;
    the summary of what came before is text."""
    if not isinstance(content, list):
        return content
    kept: list[Any] = []
    for raw in content:
        kind = raw.get("type") if isinstance(raw, Mapping) else None
        if kind == "compaction" and isinstance(raw.get("content"), str):
            kept.append({"type": "text", "text": raw["content"]})
        elif isinstance(kind, str) and kind not in _KINDS["assistant"]:
            passed_over.append(kind)
        else:
            kept.append(raw)
    return kept if kept or not content else ""


def _as_text(raw: dict[str, Any], passed_over: list[str]) -> dict[str, Any]:
    """A block of a tool's result as a block of text."""
    kind = raw.get("type")
    if not isinstance(kind, str) or kind in _TEXT:
        return raw
    if kind == "tool_reference" and isinstance(raw.get("tool_name"), str):
        return {"type": "text", "text": f"Found the tool {raw['tool_name']!r}."}
    passed_over.append(kind)
    return {"type": "text", "text": placeholder(kind)}


def _texts(content: str | Sequence[Mapping[str, Any]], where: str) -> list[str]:
    """The texts of content that may have only text blocks."""
    if not content:
        return []
    blocks = _blocks(content, where, _TEXT)
    return [block.text for block in blocks if isinstance(block, TextBlock)]


def _blocks(content: Any, where: str, kinds: Kinds) -> list[Block]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a string or a list of blocks, got {kind_of(content)}.")
    if not content:
        raise RequestError(f"{where} must not be empty.")
    return [_block(raw, f"{where}[{index}]", kinds) for index, raw in enumerate(content)]


def _block(raw: Any, where: str, kinds: Kinds) -> Block:
    if not isinstance(raw, Mapping):
        raise RequestError(f"{where} must be an object with a type, got {kind_of(raw)}.")
    kind = raw.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        got = quoted(kind, 64) if isinstance(kind, str) else kind_of(kind)
        raise RequestError(
            f"{where}.type must be {' or '.join(kinds)}, got {got}: this model reads text only."
        )
    block: Block = convert_field(raw, kinds[kind], where)
    return block


def _joined_text(texts: Any) -> str:
    return "\n".join(filter(None, texts))


def _without_billing(text: str) -> str:
    found = _BILLING.match(text)
    return text if found is None else text[found.end() :]
