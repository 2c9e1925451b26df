"""Calls as a JSON array, which is the whole answer:

    [{"name": "weather", "parameters": {"place": "Bern"}}]

No model writes this by itself. It serves required calls if the model's format is not known, or if
no structural tag can describe that format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.json_calls import JsonCalls, JsonWriting
from setpoint.frontend.chat.formats.structure import (
    arguments_schema,
    json_value,
    structural_tag,
)
from setpoint.frontend.chat.formats.tool_format import ToolFormat

JSON_ARRAY = JsonCalls(
    name="json",
    begin="",
    arguments="parameters",
    written=JsonWriting(section=("[", "]")),
    needs_special_tokens=False,
)


def required_calls(
    form: ToolFormat | None, tools: Sequence[Tool], *, parallel: bool
) -> tuple[ToolFormat, dict[str, Any]]:
    """How the model writes required calls: the format to parse the answer with, and the structural
    tag that constrains it. form: the model's format; None if it is not known."""
    structure = None if form is None else form.structure(tools, required=True, parallel=parallel)
    if form is not None and structure is not None:
        return form, structure
    return JSON_ARRAY, structural_tag(json_value(array_schema(tools, parallel=parallel)))


def array_schema(tools: Sequence[Tool], *, parallel: bool) -> dict[str, Any]:
    """The JSON schema of an array of one call or more."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": _with_own_root(arguments_schema(tool), index),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema if parallel else {**schema, "maxItems": 1}


def _with_own_root(schema: dict[str, Any], index: int) -> dict[str, Any]:
    """A tool's schema as a part of another one, so that its references still begin at its own
    root."""
    has_definitions = "$defs" in schema or "definitions" in schema
    return {"$id": f"tool-{index}", **schema} if has_definitions else schema
