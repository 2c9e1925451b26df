"""Prepares JSON schemas for llguidance: drops what it need not see, and refuses what it gets
wrong."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple, TypeGuard

from setpoint.core.errors import RequestError
from setpoint.grammar.quoted_classes import quoted_rightly
from setpoint.schemas.document import LISTS, MAPS, SINGLE, References, schemas_in
from setpoint.schemas.expressions import for_grammars
from setpoint.schemas.reading import checked_schema
from setpoint.schemas.rewriting import OPTIONS


class JsonSpacing(NamedTuple):
    """The whitespace that is allowed between two parts of a JSON text."""

    max_chars: int = 64
    """Most characters at a place. Without a limit, a small model may write line breaks until it has
    no tokens left."""
    pattern: str | None = None
    """A regular expression for the whitespace at a place, instead of a number of characters."""
    is_compact: bool = False
    """Whether there is none."""

    @property
    def has_none(self) -> bool:
        return self.is_compact or (self.pattern is None and self.max_chars == 0)

    @property
    def options(self) -> dict[str, Any]:
        """The options of llguidance that say so."""
        if self.has_none:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.pattern or rf"[ \n\r\t]{{1,{self.max_chars}}}"}


USUAL = JsonSpacing()

FORMATS = frozenset(
    (
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("time", "unknown", "uri", "uuid"),
    )
)
"""The formats that llguidance enforces. Every other one is an annotation, as JSON Schema has it."""

_COMBINING = (
    *("allOf", "oneOf", "not", "if", "dependentSchemas", "unevaluatedProperties"),
    "$dynamicRef",
)
_ABOUT_PROPERTIES = ("properties", "patternProperties", "anyOf", "$ref")
"""With a keyword of ``_COMBINING``, or with two of these, several schemas describe one object."""

_OPENING = (
    *("additionalProperties", "patternProperties", "minProperties", "propertyNames"),
    *("const", "enum"),
)
"""Keywords that concern properties which ``properties`` does not list."""


_SHORT_ESCAPES = 'nrbtf"\\'
"""The characters that may be behind a backslash where ``u`` may not: to llguidance a name of the
schema that is written with it is another name."""


def llguidance_schema(schema: Any, spacing: JsonSpacing = USUAL) -> dict[str, Any]:
    """The schema as llguidance compiles it, with options, of which those that it has itself come
    first. Raises RequestError (400) for a value that is not a schema, is nested too deeply, or
    cannot be enforced."""
    schema = checked_schema(schema)
    given = schema.get(OPTIONS)
    options = {**spacing.options, **(given if isinstance(given, dict) else {})}
    prepared = _Preparation(schema).prepared(schema)
    if any(map(_has_other_names, (each for each, _ in schemas_in(prepared)))):
        options.setdefault("json_allowed_escapes", _SHORT_ESCAPES)
    # lenient would drop keywords that llguidance does not know, without a word.
    return {**prepared, OPTIONS: {**options, "lenient": False}}


class _Preparation:
    """Removes keywords that change nothing but that llguidance refuses. Objects may then have only
    the properties that their schema lists, unless a schema says otherwise."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._references = References(root)
        all_in_place = self._references.all_in_place
        combined = [each for each, _ in schemas_in(root) if _combines(each)]
        inside = [each for one in combined for each in self._references.in_place(one)]
        self._combined = {id(each) for each in all_in_place(inside)}
        """The schemas that describe an object together with others, so one may list what another
        one does not."""
        self._closes = None not in all_in_place([each for each, _ in schemas_in(root)])

    def prepared(self, schema: Any) -> Any:
        """The schema, and the schemas in it."""
        if not isinstance(schema, dict):
            return schema
        _check_bounds(self._references.all_in_place([schema]))
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            if key in MAPS and isinstance(value, dict):
                names = map(_expression, value) if key == "patternProperties" else value
                kept[key] = dict(zip(names, map(self.prepared, value.values()), strict=True))
            elif (key in LISTS or key == "items") and isinstance(value, list):
                kept[key] = [self.prepared(each) for each in value]
            elif key in SINGLE:
                kept[key] = self.prepared(value)
            elif key == "pattern":
                kept[key] = _expression(value)
            elif not _changes_nothing(key, value):
                kept[key] = value
        if self._closes and self._lists_all(schema):
            kept["additionalProperties"] = False
        return kept

    def _lists_all(self, schema: dict[str, Any]) -> bool:
        """Whether a schema lists the properties of all that it combines."""
        if id(schema) in self._combined or not lists_all(schema):
            return False
        if not _combines(schema):
            return True
        listed = schema["properties"].keys()
        others = [each for each in self._references.all_in_place([schema]) if each is not schema]
        return all(
            isinstance(each, bool)
            or (
                not any(key in each and each[key] is not True for key in _OPENING)
                and listed >= {*each.get("properties", ()), *each.get("required", ())}
            )
            for each in others
        )


def _has_other_names(schema: dict[str, Any]) -> bool:
    """Whether objects may have other properties than those that the schema names."""
    names = schema.get("properties") or schema.get("patternProperties")
    return bool(names) and schema.get("additionalProperties") is not False


def _expression(pattern: str) -> str:
    return quoted_rightly(for_grammars(pattern))


def lists_all(schema: dict[str, Any]) -> bool:
    """Whether a schema lists properties and says nothing of others. JSON Schema allows any others
    then, with which a small model continues until it has no tokens left."""
    listed, required = schema.get("properties"), schema.get("required", [])
    return (
        isinstance(listed, dict)
        and isinstance(required, list)
        and all(name in listed for name in required)
        and not any(key in schema for key in _OPENING)
    )


def _combines(schema: dict[str, Any]) -> bool:
    """Whether a schema says that several schemas describe the same object."""
    return (
        any(key in schema for key in _COMBINING)
        or sum(key in schema for key in _ABOUT_PROPERTIES) > 1
    )


def _changes_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    return key == "uniqueItems" and value is False


def _check_bounds(schemas: list[Any]) -> None:
    """Refuse bounds that llguidance (1.9.1) gets wrong where these schemas apply to one value: it
    accepts the exclusive minimum itself."""
    objects = [each for each in schemas if isinstance(each, dict) and each.get("type") != "integer"]
    lows = {each.get("exclusiveMinimum") for each in objects}
    for name in ("maximum", "exclusiveMaximum"):
        for low, high in product(lows, {each.get(name) for each in objects}):
            if not (_is_number(low) and _is_number(high)):
                continue
            if low == math.floor(low) == math.floor(high) < high:
                raise RequestError(
                    f"exclusiveMinimum {low} together with {name} {high} is not supported; use"
                    " 'minimum' instead"
                )


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
