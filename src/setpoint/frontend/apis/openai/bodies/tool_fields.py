"""Converts tools, and the choice among them, from OpenAI's bodies to the neutral chat's."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.wording import kind_of
from setpoint.frontend.chat.chat_request import Tool, ToolChoice


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct):
    function: Function
    type: Literal["function"] = "function"


class ToolSelection(msgspec.Struct):
    """Which tools an answer may or must call."""

    mode: ToolChoice = "auto"
    named: str = ""
    allowed: tuple[str, ...] = ()


def tools_of(tools: list[FunctionTool] | None) -> tuple[Tool, ...]:
    return tuple(
        Tool(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=tool.function.parameters,
            strict=bool(tool.function.strict),
        )
        for tool in tools or ()
    )


def choice_of(value: Any) -> ToolSelection:
    """The ``tool_choice`` of a body. Raises RequestError (400) for one that is not OpenAI's."""
    match value:
        case None | "auto":
            return ToolSelection()
        case "none" | "required":
            return ToolSelection(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolSelection("required", named=name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}:
            return _allowed(mode, tools)
        case str():
            raise RequestError(
                "tool_choice must be auto, none, required, or an object that names a function."
            )
        case dict():
            raise RequestError(
                'tool_choice must be like {"type": "function", "function": {"name": "f"}}, or like'
                ' {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": […]}}.'
            )
    raise RequestError(f"tool_choice must be a string or an object, got {kind_of(value)}.")


def _allowed(mode: Any, tools: list[Any]) -> ToolSelection:
    if mode not in ("auto", "required"):
        raise RequestError("tool_choice.allowed_tools.mode must be auto or required.")
    names = []
    for index, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str(name)}}:
                names.append(name)
            case _:
                raise RequestError(
                    f"tool_choice.allowed_tools.tools[{index}] must be like"
                    ' {"type": "function", "function": {"name": "f"}}.'
                )
    if not names:
        raise RequestError("tool_choice.allowed_tools.tools must not be empty.")
    return ToolSelection(mode, allowed=tuple(names))
