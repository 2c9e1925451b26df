"""Turns the messages of a chat into the prompt that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from setpoint.core.errors import RequestError
from setpoint.core.request import Ids
from setpoint.core.shown import shown
from setpoint.core.wording import kind_of
from setpoint.frontend.intake import Intake
from setpoint.frontend.text.processor import TextProcessor

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


async def chat_prompt(
    messages: Sequence[Mapping[str, Any]],
    text: TextProcessor,
    intake: Intake,
    *,
    variables: Mapping[str, Any],
    continue_final_message: bool = False,
) -> Ids:
    """Token ids of a conversation, as the model's chat template writes it. variables: the
    template's. continue_final_message: if the last message is the assistant's, the model continues
    it. Raises RequestError (400) for messages that are not text, for those that the template
    refuses, and for a prompt that cannot fit the context.
    """
    flat = _flat(messages)
    started = ""
    if continue_final_message and flat[-1]["role"] == "assistant":
        started = flat.pop()["content"]
    prompt = await text.render_chat(flat, variables=variables) + started
    # The template writes the special tokens itself.
    return await intake.encode(prompt, add_special_tokens=False)


def _flat(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: the content of each is a string. Raises RequestError (400)
    for content that is not text."""
    flat = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            got = repr(shown(role, 64)) if isinstance(role, str) else kind_of(role)
            raise RequestError(
                f"messages[{index}].role must be one of {', '.join(ROLES)}; got {got}."
            )
        if (
            role in ("tool", "function")
            or message.get("tool_calls")
            or message.get("function_call")
        ):
            raise RequestError(
                f"messages[{index}]: tool calls are not supported by this server yet."
            )
        if role in ("system", "user") and message.get("content") is None:
            raise RequestError(f"messages[{index}].content is missing.")
        flat.append({**message, "content": _text_of(message.get("content"), index)})
    return flat


def _text_of(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"messages[{index}].content must be a string or a list of parts, got"
            f" {kind_of(content)}."
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"messages[{index}].content: this model reads text parts only, got"
                f" {repr(kind) if kind else kind_of(part)}."
            )
        texts.append(part["text"])
    return " ".join(texts)
