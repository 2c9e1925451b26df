"""Strings that are text between XML tags (the style qwen_xml), and what is not enforced of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from setpoint.schemas.document import parts_of
from setpoint.schemas.report import SchemaKeyword

_ABOUT_TEXT = ("minLength", "maxLength", "pattern", "format", "allOf", "anyOf", "$ref")


def is_free_text(schema: Any) -> bool:
    """Whether a property is any text up to the tag behind it."""
    return (
        isinstance(schema, dict)
        and schema.get("type") == "string"
        and schema.keys().isdisjoint(("enum", "const"))
    )


def not_enforced(schema: dict[str, Any]) -> Iterator[SchemaKeyword]:
    """What the schema of an object demands of its properties that are any text."""
    properties = schema.get("properties")
    if isinstance(properties, dict):
        for step, each in parts_of({"properties": properties}):
            for key in _ABOUT_TEXT:
                if is_free_text(each) and key in each:
                    yield SchemaKeyword(key, f"#{step}/{key}")
