"""JSON values: their types, and when two of them are equal."""

from __future__ import annotations

import json
from typing import Any

Kinds = frozenset[str]

KINDS: Kinds = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
"""The types of JSON values; numbers are divided in integers and fractions, as ``type`` does."""


def kind_of_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if is_integral(value) else "fraction"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def type_of(kinds: Kinds) -> str | list[str] | None:
    """The ``type`` of these; None for fractions without integers, which it cannot say."""
    if "fraction" in kinds and "integer" not in kinds:
        return None
    names = sorted(kinds - {"integer", "fraction"})
    if "integer" in kinds:
        names.append("number" if "fraction" in kinds else "integer")
    return names[0] if len(names) == 1 else names


def is_integral(value: Any) -> bool:
    """Whether a number is an integer as JSON Schema defines it: 2.0 is one."""
    return not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    )


def same_key(value: Any) -> str:
    """A text that is the same for equal values: neither the order of keys nor 1.0 instead of 1
    makes a difference."""
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    if isinstance(value, dict):
        return {key: _with_integers(each) for key, each in value.items()}
    return value
