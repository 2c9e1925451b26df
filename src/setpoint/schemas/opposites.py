"""The opposite of a schema, in keywords that grammar libraries enforce."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from setpoint.schemas.document import References, Schema
from setpoint.schemas.expressions import none_of
from setpoint.schemas.forms import all_of, any_of, objects
from setpoint.schemas.overlaps import Overlaps, kinds_of_type, listed
from setpoint.schemas.values import KINDS, Kinds, kind_of_value, type_of

MAX_EXCLUDED_CHARS = 2000
"""Most characters of the texts that a string must not be."""
MAX_DEPTH = 24
"""Most schemas inside each other in an opposite, and most references."""

_NUMBERS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_COUNTS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
_OF_STRINGS, _OF_NUMBERS = frozenset(("string",)), frozenset(("integer", "fraction"))
_OF_ARRAYS, _OF_OBJECTS = frozenset(("array",)), frozenset(("object",))
_NONE: dict[str, Kinds] = {
    **dict.fromkeys(("pattern", "format"), _OF_STRINGS),
    "multipleOf": _OF_NUMBERS,
    **dict.fromkeys(("items", "prefixItems", "contains", "uniqueItems"), _OF_ARRAYS),
    **dict.fromkeys(("additionalItems", "unevaluatedItems"), _OF_ARRAYS),
    **dict.fromkeys(("minProperties", "maxProperties", "patternProperties"), _OF_OBJECTS),
    **dict.fromkeys(("additionalProperties", "propertyNames"), _OF_OBJECTS),
    "unevaluatedProperties": _OF_OBJECTS,
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), KINDS),
}
"""Keywords whose opposites no grammar has, and the types of value of which they speak."""


class NoOpposite(Exception):
    """No grammar has the opposite of a schema."""


class Opposites:
    """written: the schema at a path as grammar libraries enforce it; spend: counts work, and raises
    if it was too much."""

    def __init__(
        self,
        references: References,
        overlaps: Overlaps,
        written: Callable[[Any, str], Schema],
        spend: Callable[[], None],
    ) -> None:
        self._references = references
        self._overlaps = overlaps
        self._written = written
        self._spend = spend

    def of(self, schema: Any, path: str, kinds: Kinds = KINDS, depth: int = 0) -> Schema:
        """What the values of these types satisfy that do not satisfy the schema. Raises
        NoOpposite."""
        self._spend()
        if depth > MAX_DEPTH:
            raise NoOpposite
        if isinstance(schema, bool):
            return _any_of_kinds(kinds) if schema is False else False
        parts: list[Schema] = []
        if "type" in schema:
            own = kinds_of_type(schema["type"])
            parts.append(_any_of_kinds(kinds - own))
            kinds &= own
        for key, value in schema.items():
            parts += self._violating(schema, key, value, path, kinds, depth)
        return any_of(parts)

    def _violating(
        self, schema: dict[str, Any], key: str, value: Any, path: str, kinds: Kinds, depth: int
    ) -> Iterator[Schema]:
        """What violates one keyword."""

        def inner(schema: Any, step: str = "", kinds: Kinds = kinds) -> Schema:
            return self.of(schema, f"{path}/{key}{step}", kinds, depth + 1)

        if kinds & _NONE.get(key, frozenset()) and not allows_all(key, value):
            raise NoOpposite
        if key in ("const", "enum"):
            if not ("const" in schema and key == "enum"):
                yield from _other_than(listed(schema) or [], kinds)
            elif kinds:
                raise NoOpposite
        elif key in _NUMBERS and kinds & {"integer", "fraction"}:
            if isinstance(value, bool):
                raise NoOpposite
            yield {"type": _number(kinds), _NUMBERS[key]: value}
        elif key in _COUNTS and _COUNTS[key][0] in kinds:
            kind, other, step = _COUNTS[key]
            if value + step >= 0:
                yield {"type": kind, other: int(value) + step}
        elif key == "required" and "object" in kinds:
            yield from (_without(name) for name in value)
        elif key == "properties" and "object" in kinds:
            for name, each in value.items():
                opposite = inner(each, f"/{name}", KINDS)
                if opposite is not False:
                    yield {"type": "object", **objects(name, opposite, required=[name])}
        elif key == "allOf":
            for at, each in enumerate(value):
                yield inner(each, f"/{at}")
        elif key in ("anyOf", "oneOf"):
            if key == "oneOf" and any(
                not self._overlaps.exclude(one, other, kinds)
                for at, one in enumerate(value)
                for other in value[:at]
            ):
                raise NoOpposite
            yield all_of(*(inner(each, f"/{at}") for at, each in enumerate(value)))
        elif key == "not":
            yield all_of(_any_of_kinds(kinds), self._written(value, f"{path}/not"))
        elif key == "if":
            if "then" in schema:
                condition = self._written(value, f"{path}/if")
                yield all_of(condition, self.of(schema["then"], f"{path}/then", kinds, depth + 1))
            if "else" in schema:
                fails = inner(value)
                yield all_of(fails, self.of(schema["else"], f"{path}/else", kinds, depth + 1))
        elif key in ("dependentRequired", "dependentSchemas", "dependencies") and "object" in kinds:
            for name, needed in value.items():
                missing = needed if isinstance(needed, list) else inner(needed, f"/{name}")
                yield from _present_without(name, missing)
        elif key == "$ref":
            place = self._references.place(schema)
            if place is None:
                raise NoOpposite
            yield self.of(*place, kinds, depth + 1)


def _present_without(name: str, missing: Any) -> Iterator[Schema]:
    """Objects with a property that lack one of these, or satisfy a schema."""
    present = {"type": "object", "required": [name]}
    if isinstance(missing, list):
        yield from (all_of(present, _without(each)) for each in missing if each != name)
    else:
        yield all_of(present, missing)


def allows_all(key: str, value: Any) -> bool:
    """Whether nothing violates a keyword."""
    if key == "uniqueItems":
        return value is False
    return key != "contains" and (value is True or value in ({}, []))


def _without(name: str) -> Schema:
    """Objects without a property."""
    return {"type": "object", **objects(name, False)}


def _any_of_kinds(kinds: Kinds) -> Schema:
    if kinds == KINDS:
        return True
    if not kinds:
        return False
    given = type_of(kinds)
    if given is None:
        raise NoOpposite
    return {"type": given}


def _number(kinds: Kinds) -> str:
    given = type_of(kinds & {"integer", "fraction"})
    if not isinstance(given, str):
        raise NoOpposite
    return given


def _other_than(values: list[Any], kinds: Kinds) -> Iterator[Schema]:
    """Every value of these types but some."""
    own = {kind_of_value(value) for value in values}
    if own & {"integer", "fraction"}:
        own |= {"integer", "fraction"}
    yield _any_of_kinds(kinds - own)
    if own & kinds & {"array", "object"}:
        raise NoOpposite
    if "boolean" in own & kinds:
        yield {
            "enum": [each for each in (True, False) if not any(each is value for value in values)]
        }
    if own & kinds & {"integer", "fraction"}:
        name = _number(kinds)
        numbers = {value for value in values if kind_of_value(value) in ("integer", "fraction")}
        edges = [None, *sorted(numbers), None]
        for low, high in pairwise(edges):
            found: dict[str, Any] = {"type": name}
            if low is not None:
                found["exclusiveMinimum"] = low
            if high is not None:
                found["exclusiveMaximum"] = high
            yield found
    if "string" in own & kinds:
        texts = [value for value in values if isinstance(value, str)]
        if sum(map(len, texts)) > MAX_EXCLUDED_CHARS:
            raise NoOpposite
        yield {"type": "string", "pattern": none_of(texts)}
