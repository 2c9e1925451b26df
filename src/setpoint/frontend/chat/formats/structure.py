"""Structural tags, in xgrammar's form: text around JSON that satisfies a schema."""

from __future__ import annotations

from typing import Any

from setpoint.frontend.chat.chat_request import Tool

Format = dict[str, Any]


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments."""
    return tool.parameters or {"type": "object"}


def held_arguments(tool: Tool, *, required: bool) -> Format:
    """The format of a call's arguments: they satisfy the tool's schema if the tool is strict or a
    call is required, and are any object otherwise."""
    schema = arguments_schema(tool) if required or tool.strict else {"type": "object"}
    return json_value(schema)


def structural_tag(form: Format) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_value(schema: dict[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def calls(
    tags: list[Format], *, trigger: str, separator: str, required: bool, parallel: bool
) -> dict[str, Any]:
    """The structural tag of calls that are not in a section. tags: one for each tool, all beginning
    with ``trigger``. separator: the text between two calls.

    If ``required``, the answer is calls alone; otherwise any text, in which a tag follows every
    trigger.
    """
    if required:
        return structural_tag(_row(tags, separator=separator, parallel=parallel))
    return structural_tag(_triggered(tags, trigger=trigger, parallel=parallel))


def calls_in_section(
    tags: list[Format],
    *,
    section: tuple[str, str],
    trigger: str = "",
    separator: str,
    required: bool,
    parallel: bool,
) -> dict[str, Any]:
    """The structural tag of calls that stand together between the markers of a section; see
    ``calls``. trigger: the beginning of a section, if it is not all the text before its first
    call."""
    begin, end = section
    whole = tag(begin, _row(tags, separator=separator, parallel=parallel), end)
    if required:
        return structural_tag(whole)
    return structural_tag(_triggered([whole], trigger=trigger or begin, parallel=parallel))


def _row(tags: list[Format], *, separator: str, parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _triggered(tags: list[Format], *, trigger: str, parallel: bool) -> Format:
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not parallel,
    }
