"""Structural tags of calls that are written as elements: the arguments in the order of the tool's
schema, strings as they are, everything else as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.structure import (
    Format,
    calls,
    calls_in_section,
    json_value,
    tag,
)

_OF_AN_OBJECT = {"type", "properties", "required", "additionalProperties", "title", "description"}
_OF_A_STRING = {"type", "enum", "title", "description", "default", "examples"}
_REFERS = ("$ref", "$dynamicRef")


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlWriting:
    """How a model writes calls, line ends included."""

    call: Callable[[str], tuple[str, str]]
    """The text before and after the arguments of the function of this name."""
    argument: Callable[[str, bool], tuple[str, str]]
    """The text before and after the value of the argument of this name; the second parameter
    says whether the value is a string."""
    section: tuple[str, str] = ("", "")
    """The text around all calls together."""
    separator: str = ""
    trigger: str = ""
    """The marker after which a call must follow."""


def xml_structure(
    writing: XmlWriting, tools: Sequence[Tool], *, required: bool, parallel: bool
) -> dict[str, Any] | None:
    """The same as ``ToolFormat.structure``. None if a schema says more than the types and choices
    of an object's properties: no constraint on plain text can enforce the rest."""
    tags = []
    for tool in tools:
        begin, end = writing.call(tool.name)
        content: Format | None = {"type": "any_text"}
        if required or tool.strict:
            content = _arguments(writing, tool.parameters or {})
        if content is None:
            return None
        tags.append(tag(begin, content, end))
    if writing.section[0]:
        return calls_in_section(
            tags,
            section=writing.section,
            separator=writing.separator,
            required=required,
            parallel=parallel,
        )
    return calls(
        tags,
        trigger=writing.trigger,
        separator=writing.separator,
        required=required,
        parallel=parallel,
    )


def _arguments(writing: XmlWriting, schema: Mapping[str, Any]) -> Format | None:
    properties = schema.get("properties", {})
    if schema.keys() - _OF_AN_OBJECT or not isinstance(properties, dict):
        return None
    wanted = schema.get("required", [])
    if not _are_strings(wanted) or not (names := set(wanted)) <= properties.keys():
        return None
    parts: list[Format] = []
    for name, each in properties.items():
        part = _argument(writing, name, each)
        if part is None:
            return None
        parts.append(part if name in names else {"type": "optional", "content": part})
    if len(parts) == 1:
        return parts[0]
    return {"type": "sequence", "elements": parts or [{"type": "const_string", "value": ""}]}


def _argument(writing: XmlWriting, name: str, schema: Any) -> Format | None:
    if not isinstance(schema, dict) or not isinstance(schema.get("type"), str):
        return None
    is_string = schema["type"] == "string"
    begin, end = writing.argument(name, is_string)
    if not is_string:
        return None if _refers(schema) else tag(begin, json_value(schema), end)
    choices = schema.get("enum")
    if schema.keys() - _OF_A_STRING or not (choices is None or _are_strings(choices)):
        return None
    if choices is None:
        return tag(begin, {"type": "any_text"}, end)
    values = [{"type": "const_string", "value": choice} for choice in choices]
    return tag(begin, {"type": "or", "elements": values}, end)


def _are_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


def _refers(schema: Any) -> bool:
    """Whether a schema refers to another part of the tool's, which would be missing."""
    if isinstance(schema, dict):
        return any(key in schema for key in _REFERS) or any(map(_refers, schema.values()))
    return isinstance(schema, list) and any(map(_refers, schema))
