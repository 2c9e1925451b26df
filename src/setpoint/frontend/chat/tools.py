"""The tools of a chat: their checks, and the forms in which a chat template is given them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt, quoted
from setpoint.frontend.chat.chat_messages import as_text
from setpoint.frontend.chat.chat_request import ChatRequest, Tool

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""Names that need no escaping in a prompt, in JSON or in a grammar."""


def check_tools(request: ChatRequest) -> None:
    """Raise RequestError (400) for tools that cannot be distinguished or written down, and for a
    choice among tools that do not exist."""
    names: set[str] = set()
    for index, tool in enumerate(request.tools):
        check_name(tool.name, f"tools[{index}]")
        if tool.name in names:
            raise RequestError(f"tools[{index}]: two tools have the name {tool.name!r}.")
        names.add(tool.name)
    if request.tool_choice == "required" and not names:
        raise RequestError("tool_choice requires a call, but tools is empty.")
    for name in filter(None, (request.named_tool, *request.allowed_tools)):
        if name not in names:
            listed = excerpt(", ".join(sorted(names)), 200) or "none"
            raise RequestError(
                f"tool_choice: Tool {quoted(name, 64)} not found in tools list, which has:"
                f" {listed}."
            )


def check_name(name: str, where: str) -> None:
    """Raise RequestError (400) for a tool's name that could not be written down. where: the place
    of the tool in the body."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}: the name {quoted(name, 64)} must have 1 to 128 letters, digits or any of"
            " _.:/-."
        )


def visible_tools(request: ChatRequest) -> Sequence[Tool]:
    """The tools that the model sees."""
    if request.tool_choice == "none":
        return ()
    if request.named_tool:
        return [tool for tool in request.tools if tool.name == request.named_tool]
    return request.tools


def for_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools in OpenAI's shape, which Hugging Face's templates read."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


_HOW_TO_CALL = """\
You can call functions. Each line here describes one, with a JSON schema of its arguments:
{tools}

To call a function, write its name and its arguments as JSON between two tags, like this:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
The results come back between <tool_response> and </tool_response>."""


def told_in_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """The messages for a template that does not support tools. Their description comes after the
    system message, or before the first message of the user, as not every template takes a system
    message. Calls are part of the assistant's text, and results that follow each other are one
    message of the user, as some templates insist on turns."""
    told: list[dict[str, Any]] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{as_text(message['content'])}\n</tool_response>")
            continue
        _tell(told, results)
        if message.get("tool_calls"):
            calls = "\n".join(_written(call["function"]) for call in message["tool_calls"])
            content = f"{as_text(message['content'])}\n{calls}".strip()
            told.append({"role": "assistant", "content": content})
        else:
            told.append(dict(message))
    _tell(told, results)
    if tools:
        _describe(told, tools)
    return told


def _tell(told: list[dict[str, Any]], results: list[str]) -> None:
    """Write results that follow each other into the messages, and forget them."""
    if results:
        told.append({"role": "user", "content": "\n".join(results)})
        results.clear()


def _describe(told: list[dict[str, Any]], tools: Sequence[Tool]) -> None:
    """Write the description of the tools into the messages."""
    lines = "\n".join(_json(each["function"]) for each in for_template(tools))
    description = _HOW_TO_CALL.format(tools=lines)
    if told[0]["role"] == "system":
        told[0]["content"] = f"{as_text(told[0]['content'])}\n\n{description}".strip()
        return
    first = next(message for message in told if message["role"] == "user")
    first["content"] = f"{description}\n\n{as_text(first['content'])}"


def _written(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{_json(call)}\n</tool_call>"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
