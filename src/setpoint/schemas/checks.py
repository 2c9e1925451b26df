"""Whether the keywords of a schema have values of the types that they must have."""

from __future__ import annotations

from typing import Any

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt
from setpoint.schemas.document import Node
from setpoint.schemas.values import is_integral

TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")

COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAPS = (
    *("properties", "patternProperties", "dependentSchemas", "dependentRequired"),
    *("dependencies", "$defs", "definitions"),
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "enum")


def check_keywords(node: Node) -> None:
    """Raise RequestError (400) that names the first keyword whose value is not of its type."""
    for key, value in node.schema.items():
        wanted = _wanted(key, value)
        if wanted:
            raise RequestError(f"{excerpt(node.path, 200)}/{key}: the value must be {wanted}")


def _wanted(key: str, value: Any) -> str:
    """What the value of a keyword must be; "" if it is that."""
    if key in COUNTS:
        return "" if is_integral(value) and value >= 0 else "an integer that is not negative"
    if key in _NUMBERS:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key == "multipleOf":
            return "" if is_number and value > 0 else "a number above 0"
        return "" if is_number else "a number"
    if key in _MAPS:
        return "" if isinstance(value, dict) else "an object"
    if key in _LISTS:
        return "" if isinstance(value, list) else "a list"
    if key in ("pattern", "$ref", "$dynamicRef"):
        return "" if isinstance(value, str) else "a string"
    if key == "uniqueItems":
        return "" if isinstance(value, bool) else "true or false"
    if key == "required":
        return "" if _is_names(value) else "a list of strings"
    if key == "type":
        return "" if _is_types(value) else f"one of {', '.join(TYPES)}, or a list of these"
    return ""


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(isinstance(name, str) and name in TYPES for name in names)
