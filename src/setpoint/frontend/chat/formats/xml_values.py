"""The values of arguments that a model writes as plain text, as JSON of the type that the tool's
schema asks for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.bare_words import WORDS, json_number
from setpoint.frontend.chat.formats.json_scan import json_text
from setpoint.frontend.chat.formats.python_values import python_value

ANY = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
STRING = frozenset({"string"})

_TYPES = {"true": "boolean", "false": "boolean", "null": "null"}
_MAX_SCHEMAS = 100
"""Most schemas that are looked at for the types of one argument."""


class ArgumentTypes:
    """The types of arguments, which are looked for once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], frozenset[str]] = {}

    def of(self, tool: Tool | None, key: str) -> frozenset[str]:
        """The JSON types that the tool's schema allows for an argument; all of them if it does not
        say so."""
        schema = tool.parameters if tool is not None else None
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if tool is None or not isinstance(properties, dict) or key not in properties:
            return ANY
        place = tool.name, key
        if place not in self._found:
            self._found[place] = _types(properties[key], schema or {}, iter(range(_MAX_SCHEMAS)))
        return self._found[place]


def _types(wanted: Any, root: Mapping[str, Any], budget: Iterator[int]) -> frozenset[str]:
    """budget: has an element for each schema that may still be looked at."""
    if not isinstance(wanted, dict) or next(budget, None) is None:
        return ANY
    named = wanted.get("type")
    if isinstance(named, str):
        named = [named]
    if isinstance(named, list):
        return frozenset(each for each in named if isinstance(each, str)) & ANY or ANY
    for key in ("anyOf", "oneOf"):
        choices = wanted.get(key)
        if isinstance(choices, list) and choices:
            return frozenset().union(*(_types(each, root, budget) for each in choices))
    values = [wanted["const"]] if "const" in wanted else wanted.get("enum")
    if isinstance(values, list) and values and all(isinstance(each, str) for each in values):
        return STRING
    target = wanted.get("$ref")
    if isinstance(target, str) and target.startswith("#/"):
        found: Any = root
        for part in target[2:].split("/"):
            found = found.get(part) if isinstance(found, dict) else None
        return _types(found, root, budget)
    return ANY


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that may have any of these types. What fits none of them is a string."""
    bare = text.strip()
    if (word := WORDS.get(bare)) is not None and _TYPES[word] in types:
        return word
    if types & {"integer", "number"} and (number := _number(bare, types)):
        return number
    if bare[:1] in ("{", "[") and types & {"object", "array"}:
        kind = "object" if bare[0] == "{" else "array"
        if kind in types and (found := _collection(bare)):
            return found
    return json_text(text)


def _number(text: str, types: frozenset[str]) -> str:
    number = json_number(text)
    if not number:
        return ""
    value = float(number)
    if not math.isfinite(value):
        return ""
    if "number" in types or number.lstrip("-").isdigit():
        return number
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else ""


def _collection(text: str) -> str:
    """An object or array, also with quotes that are escaped as in a JSON string, or as Python
    writes it. Empty if the text is neither."""
    unescaped = _decoded(f'"{text}"') if '\\"' in text else None
    for each in (text, unescaped):
        if isinstance(each, str) and _decoded(each) is not None:
            return each
    return _from_python(text)


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None


def _from_python(text: str) -> str:
    """A dict or list as Python writes it: with single quotes, True and None."""
    try:
        return json_text(python_value(text))
    except (ValueError, RecursionError):
        return ""
