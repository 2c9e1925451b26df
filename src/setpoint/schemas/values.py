"""JSON values: their types, and when two of them are equal."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

Kind = Literal["null", "boolean", "number", "string", "array", "object"]

KINDS: tuple[Kind, ...] = ("null", "boolean", "number", "string", "array", "object")


def kind_of_value(value: Any) -> Kind:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def is_integral(value: Any) -> bool:
    """Whether a number is an integer as JSON Schema defines it: 2.0 is one."""
    return not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    )


def with_integers(value: Any) -> Any:
    """The value with integral floats as integers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [with_integers(each) for each in value]
    if isinstance(value, dict):
        return {key: with_integers(each) for key, each in value.items()}
    return value


def is_multiple(value: float, of: float) -> bool:
    """Whether the decimal number ``value`` is an integer multiple of ``of``."""
    return _fraction(value) % _fraction(of) == 0


@lru_cache(1024)
def _fraction(value: float) -> Fraction:
    return Fraction(repr(value))


@dataclass(frozen=True, slots=True)
class Constant:
    """A JSON value that may be compared and hashed."""

    key: str
    """Equal for equal values: neither the order of keys nor 1.0 instead of 1 makes a difference."""
    value: Any = field(compare=False)

    @property
    def kind(self) -> Kind:
        return kind_of_value(self.value)


def constant(value: Any) -> Constant:
    plain = with_integers(value)
    return Constant(json.dumps(plain, sort_keys=True), plain)
