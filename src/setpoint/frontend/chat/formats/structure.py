"""Structural tags, in xgrammar's form: text around JSON that satisfies a schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from setpoint.frontend.chat.request import Tool

Format = dict[str, Any]


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments."""
    return tool.parameters or {"type": "object"}


def held_schema(tool: Tool, *, required: bool) -> dict[str, Any]:
    """The schema that the arguments of a call are held to."""
    return arguments_schema(tool) if required or tool.strict else {"type": "object"}


def structural_tag(form: Format) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_value(schema: dict[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def tagged_calls(
    tools: Sequence[Tool],
    *,
    begin: Callable[[Tool], str],
    end: str,
    trigger: str,
    separator: str,
    required: bool,
    parallel: bool,
) -> dict[str, Any]:
    """Calls that each stand in markers of their own, with the arguments as JSON between them.

    begin: everything before the arguments; it starts with ``trigger``. separator: what stands
    between two calls that follow each other directly.
    """
    tags = [
        tag(begin(tool), json_value(held_schema(tool, required=required)), end) for tool in tools
    ]
    return structural_tag(
        calls(tags, trigger=trigger, separator=separator, required=required, parallel=parallel)
    )


def calls(
    tags: list[Format], *, trigger: str, separator: str, required: bool, parallel: bool
) -> Format:
    """One of the tags or more and nothing else, if ``required``; otherwise any text, in which a tag
    follows every ``trigger``."""
    if required:
        return {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": separator,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not parallel,
    }
