"""Prepares JSON schemas for llguidance: drops what it need not see, and refuses what it gets
wrong."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeGuard

from setpoint.core.errors import RequestError
from setpoint.grammar.quoted_classes import quoted_rightly
from setpoint.schemas.document import LISTS, MAPS, SINGLE, schemas_in
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
    prepared = _prepared(schema, closes=not _combines(schema))
    if any(map(_has_other_names, (each for each, _ in schemas_in(prepared)))):
        options.setdefault("json_allowed_escapes", _SHORT_ESCAPES)
    # lenient would drop keywords that llguidance does not know, without a word.
    return {**prepared, OPTIONS: {**options, "lenient": False}}


def _prepared(schema: Any, *, closes: bool) -> Any:
    """The schema, and the schemas in it, without keywords that change nothing but that llguidance
    refuses. closes: whether objects may have only the properties that their schemas list, unless a
    schema says otherwise."""
    if not isinstance(schema, dict):
        return schema
    _check_bounds(schema)
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            names = map(_expression, value) if key == "patternProperties" else value
            inner = (_prepared(each, closes=closes) for each in value.values())
            kept[key] = dict(zip(names, inner, strict=True))
        elif (key in LISTS or key == "items") and isinstance(value, list):
            kept[key] = [_prepared(each, closes=closes) for each in value]
        elif key in SINGLE:
            kept[key] = _prepared(value, closes=closes)
        elif key == "pattern":
            kept[key] = _expression(value)
        elif not _changes_nothing(key, value):
            kept[key] = value
    if closes and lists_all(schema):
        kept["additionalProperties"] = False
    return kept


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


def _combines(schema: Any) -> bool:
    """Whether several schemas describe the same object anywhere: one of them may list what another
    one does not."""
    return any(
        any(key in each for key in _COMBINING) or sum(key in each for key in _ABOUT_PROPERTIES) > 1
        for each, _ in schemas_in(schema)
    )


def _changes_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    return key == "uniqueItems" and value is False


def _check_bounds(schema: dict[str, Any]) -> None:
    """Refuse bounds that llguidance (1.9.1) gets wrong: it accepts the exclusive minimum itself."""
    low = schema.get("exclusiveMinimum")
    for name in ("maximum", "exclusiveMaximum"):
        high = schema.get(name)
        if not (_is_number(low) and _is_number(high)) or schema.get("type") == "integer":
            continue
        if low == math.floor(low) == math.floor(high) < high:
            raise RequestError(
                f"exclusiveMinimum {low} together with {name} {high} is not supported; use"
                " 'minimum' instead"
            )


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
