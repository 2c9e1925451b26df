"""Turns one turn of a conversation into the prompt that the model reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from setpoint.core.errors import RequestError
from setpoint.frontend.chat.chat_messages import as_text, checked_messages
from setpoint.frontend.chat.chat_request import ChatRequest
from setpoint.frontend.chat.tools import check_tools, for_template, told_in_messages, visible_tools
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.shapes import TemplateShapes

_SWITCHES = ("enable_thinking", "thinking")
"""The variables that turn the reasoning on or off; templates of different families know one or the
other."""


@dataclass(slots=True, frozen=True)
class Prompt:
    """A prompt as text."""

    rendered: str
    """What the chat template wrote."""
    started: str
    """The beginning of the answer that the client supplied; it comes after ``rendered``."""
    passed_over: Sequence[str] = ()
    """Types of the parts of tools' results that are not text."""


async def chat_prompt(
    request: ChatRequest, text: TextProcessor, defaults: Mapping[str, Any]
) -> Prompt:
    """The conversation as the model's chat template writes it. defaults: variables of the template
    that the request does not set. Raises RequestError (400) for messages or tools that are wrong,
    and for those that the template refuses."""
    check_tools(request)
    passed_over: list[str] = []
    messages = checked_messages(request.messages, passed_over)
    messages = await _in_shape(messages, text.shapes)
    if not text.template_mentions("developer"):
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"
    variables = dict(defaults)
    if request.thinking is not None:
        variables |= dict.fromkeys(_SWITCHES, request.thinking)
    tools = visible_tools(request)
    is_continued = request.continue_final_message and messages[-1]["role"] == "assistant"
    if is_continued and messages[-1].get("tool_calls"):
        raise RequestError(
            "continue_final_message: the last message has tool_calls, so its text cannot be"
            " continued."
        )
    if text.template_reads("tools"):
        variables["tools"] = for_template(tools) or None
    elif tools or not text.template_mentions("tool_calls"):
        messages = told_in_messages(messages, tools)
    variables.update(request.variables)
    if is_continued:
        prompt = await _continued(messages, text, variables)
        return replace(prompt, passed_over=passed_over)
    rendered = await text.render_chat(
        messages, add_generation_prompt=request.add_generation_prompt, variables=variables
    )
    return Prompt(rendered, "", passed_over)


async def asks_to_reason(
    prompt: Prompt, request: ChatRequest, text: TextProcessor, defaults: Mapping[str, Any]
) -> bool:
    """Whether a conversation's prompt differs from the one with the reasoning turned off. What a
    variable means that nobody has set, only the template knows. The arguments: see
    ``chat_prompt``, which has made ``prompt``."""
    if not any(map(text.template_reads, _SWITCHES)):
        return False
    kept = {name: value for name, value in request.variables.items() if name not in _SWITCHES}
    off = msgspec.structs.replace(request, thinking=False, variables=kept)
    try:
        return (await chat_prompt(off, text, defaults)).rendered != prompt.rendered
    except RequestError:
        return True  # the template refuses to turn it off


async def _in_shape(messages: list[dict[str, Any]], shapes: TemplateShapes) -> list[dict[str, Any]]:
    """The messages in shapes that the template reads."""
    for message in messages:
        if isinstance(message["content"], list) and not await shapes.reads_parts(message["role"]):
            message["content"] = as_text(message["content"])
        for call in message.get("tool_calls", ()):
            function, read_as = call["function"], await shapes.reads_arguments()
            is_text = isinstance(function["arguments"], str)
            if read_as == "text" and not is_text:
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            elif read_as == "object" and is_text:
                # The model made a mistake, or the call was cut off: the conversation must go on.
                function["arguments"] = {"arguments": function["arguments"]}
    return messages


_HERE = "THE_ANSWER_GOES_ON_HERE "
"""Marks the end of the message to be continued while it is rendered. The space shows whether the
template drops whitespace there."""


async def _continued(
    messages: list[dict[str, Any]], text: TextProcessor, variables: Mapping[str, Any]
) -> Prompt:
    """The prompt that ends within the last message. It is rendered as an earlier answer is, which
    may differ from the beginning of a new one: some templates open the reasoning there. A template
    that cannot show such a message gets a prompt for a new answer, and the message follows it."""
    *earlier, last = messages
    content = as_text(last["content"])
    marked = [*earlier, {**last, "content": content + _HERE}]
    try:
        whole = await text.render_chat(marked, add_generation_prompt=False, variables=variables)
    except RequestError:
        whole = ""
    before, found, after = whole.rpartition(_HERE.rstrip())
    if found and not after.startswith(" "):
        before = before.rstrip()
    started = content if before.endswith(content) else content.strip()
    if found and before.endswith(started):
        return Prompt(before.removesuffix(started), started)
    return Prompt(await text.render_chat(earlier, variables=variables), content)
