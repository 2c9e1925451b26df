"""Whether the keywords of a schema have values of the types that they must have."""

from __future__ import annotations

import json
from typing import Any

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt
from setpoint.schemas.expressions import ends_in_escape
from setpoint.schemas.values import is_integral

TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")

COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_MAPS = (
    *("properties", "patternProperties", "dependentSchemas", "dependentRequired"),
    *("dependencies", "$defs", "definitions"),
)
_WHOLE = "that does not end with a backslash which nothing follows"
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "enum")


def check_keywords(schema: dict[str, Any], path: str, *, is_old: bool = False) -> None:
    """Raise RequestError (400) that names the first keyword whose value is not of its type.
    is_old: whether exclusive bounds may be true or false, as in draft 4."""
    for key, value in schema.items():
        if is_old and key in _EXCLUSIVE and isinstance(value, bool):
            continue
        if wanted := _wanted(key, value):
            got = excerpt(json.dumps(value, ensure_ascii=False), 64)
            place = excerpt(path, 200)
            raise RequestError(f"{place}/{key}: the value must be {wanted}; it is {got}")


def _wanted(key: str, value: Any) -> str:
    """What the value of a keyword must be; "" if it is that."""
    if key in COUNTS:
        return "" if is_integral(value) and value >= 0 else "an integer that is not negative"
    if key in _NUMBERS:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key == "multipleOf":
            return "" if is_number and value > 0 else "a number above 0"
        return "" if is_number else "a number"
    if key == "patternProperties" and isinstance(value, dict):
        is_open = any(map(ends_in_escape, value))
        return f"an object of which each key is a regular expression {_WHOLE}" if is_open else ""
    if key in _MAPS:
        return "" if isinstance(value, dict) else "an object"
    if key in _LISTS:
        return "" if isinstance(value, list) else "a list"
    if key == "pattern" and isinstance(value, str):
        return f"a regular expression {_WHOLE}" if ends_in_escape(value) else ""
    if key in ("pattern", "format", "$ref", "$dynamicRef"):
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
