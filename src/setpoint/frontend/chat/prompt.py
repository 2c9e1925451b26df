"""Turns one turn of a conversation into the prompt that the model reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from setpoint.core.errors import RequestError
from setpoint.frontend.chat.messages import checked_messages
from setpoint.frontend.chat.request import ChatRequest
from setpoint.frontend.chat.tools import check_tools, for_template, offered, told_in_messages
from setpoint.frontend.text.processor import TextProcessor


@dataclass(slots=True, frozen=True)
class Prompt:
    """A prompt as text."""

    rendered: str
    """What the chat template wrote."""
    started: str
    """The beginning of the answer that the client supplied; it comes after ``rendered``."""
    variables: Mapping[str, Any]
    """What the template was given besides the messages."""


async def chat_prompt(
    request: ChatRequest, text: TextProcessor, defaults: Mapping[str, Any]
) -> Prompt:
    """The conversation as the model's chat template writes it. defaults: variables of the template
    that the request does not set. Raises RequestError (400) for messages or tools that are wrong,
    and for those that the template refuses."""
    check_tools(request)
    messages = checked_messages(request.messages)
    started = _started(messages) if request.continue_final_message else ""
    if not text.template_mentions("developer"):
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"
    variables = dict(defaults)
    if request.thinking is not None:
        # Templates of different families know one name or the other.
        variables |= {"enable_thinking": request.thinking, "thinking": request.thinking}
    tools = offered(request)
    if text.template_reads("tools"):
        variables["tools"] = for_template(tools) or None
    elif tools or not text.template_mentions("tool_calls"):
        messages = told_in_messages(messages, tools)
    variables.update(request.variables)
    return Prompt(await text.render_chat(messages, variables=variables), started, variables)


def _started(messages: list[dict[str, Any]]) -> str:
    """Take the assistant's message that the model shall continue out of the conversation; returns
    its text, "" if the last message is another's."""
    if messages[-1]["role"] != "assistant":
        return ""
    last = messages.pop()
    if last.get("tool_calls"):
        raise RequestError(
            "continue_final_message: the last message has tool_calls, so its text cannot be"
            " continued."
        )
    content: str = last["content"]
    return content
