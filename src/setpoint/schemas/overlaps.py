"""Whether two schemas exclude each other: no value satisfies both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from setpoint.schemas.document import References, Schema
from setpoint.schemas.values import KINDS, Kinds, kind_of_value, same_key

MAX_DEPTH = 16
"""Most steps into properties, alternatives and references."""


class Overlaps:
    """spend: counts work, and raises if it was too much."""

    def __init__(self, references: References, spend: Callable[[], None]) -> None:
        self._references = references
        self._spend = spend
        self._kinds: dict[int, Kinds] = {}
        """Types of what references lead to."""

    def kinds(self, schema: Any, depth: int = 0) -> Kinds:
        """The types of value that may satisfy a schema."""
        self._spend()
        if not isinstance(schema, dict):
            return frozenset() if schema is False else KINDS
        found = kinds_of_type(schema["type"]) if "type" in schema else KINDS
        if (values := listed(schema)) is not None:
            found &= {kind_of_value(value) for value in values}
        excluded = schema.get("not")
        if excluded is True:
            return frozenset()
        if isinstance(excluded, dict) and excluded.keys() <= {"type"}:
            found -= kinds_of_type(excluded["type"]) if excluded else KINDS
        if depth < MAX_DEPTH:
            if "$ref" in schema:
                found &= self.kinds_of_target(schema, depth + 1)
            for each in schema.get("allOf", ()):
                found &= self.kinds(each, depth + 1)
            for key in ("anyOf", "oneOf"):
                if key in schema:
                    found &= frozenset().union(
                        *(self.kinds(each, depth + 1) for each in schema[key])
                    )
        return found

    def kinds_of_target(self, schema: dict[str, Any], depth: int = 0) -> Kinds:
        """The types of what the ``$ref`` of a schema leads to."""
        target = self._references.target(schema)
        if id(target) not in self._kinds:
            self._kinds[id(target)] = KINDS  # what a reference to itself excludes is not known
            self._kinds[id(target)] = self.kinds(target, depth)
        return self._kinds[id(target)]

    def exclude(self, one: Any, other: Any, kinds: Kinds = KINDS, depth: int = 0) -> bool:
        """Whether it is certain that no value of these types satisfies both."""
        self._spend()
        if depth > MAX_DEPTH or None in (one, other):
            return False
        kinds = kinds & self.kinds(one) & self.kinds(other)
        if not kinds:
            return True
        both = isinstance(one, dict) and isinstance(other, dict)
        if both and self._differ(one, other, kinds, depth):
            return True
        for first, second in ((one, other), (other, one)):
            if not isinstance(first, dict):
                continue
            together = [self._references.target(first)] if "$ref" in first else []
            together += first.get("allOf", ())
            if any(self.exclude(each, second, kinds, depth + 1) for each in together):
                return True
            for key in ("anyOf", "oneOf"):
                if key in first and all(
                    self.exclude(each, second, kinds, depth + 1) for each in first[key]
                ):
                    return True
        return False

    def _differ(self, one: dict[str, Any], other: dict[str, Any], kinds: Kinds, depth: int) -> bool:
        first, second = listed(one), listed(other)
        if first is not None and second is not None:
            return {same_key(value) for value in first}.isdisjoint(map(same_key, second))
        if kinds != {"object"}:
            return False
        return any(
            self.exclude(property_of(one, name), property_of(other, name), depth=depth + 1)
            for name in dict.fromkeys((*one.get("required", ()), *other.get("required", ())))
        )


def listed(schema: dict[str, Any]) -> list[Any] | None:
    """The values of ``const`` or ``enum``."""
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def kinds_of_type(given: Any) -> Kinds:
    """The types that a ``type`` names; a number is an integer or a fraction."""
    names = set(given if isinstance(given, list) else [given])
    if "number" in names:
        names |= {"integer", "fraction"}
    return KINDS & names


def property_of(schema: dict[str, Any], name: str) -> Schema | None:
    """What a schema says of a property; None if it is not known."""
    if name in schema.get("properties", ()):
        return schema["properties"][name]  # type: ignore[no-any-return]
    return None if schema.get("patternProperties") else schema.get("additionalProperties", True)
