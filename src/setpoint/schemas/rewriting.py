"""A client's schema as grammar libraries enforce it: one pass for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from setpoint.core.constraint import MAX_CHARS
from setpoint.core.errors import RequestError
from setpoint.schemas.atoms import Source
from setpoint.schemas.checks import COUNTS
from setpoint.schemas.document import LISTS, MAPS, SINGLE, Document, schemas_in
from setpoint.schemas.expressions import is_regular
from setpoint.schemas.limits import LoopError, TooLargeError, TooManyError
from setpoint.schemas.report import Report
from setpoint.schemas.shapes import Shapes
from setpoint.schemas.states import Demand
from setpoint.schemas.writing import Schema, Writer

REWRITTEN = frozenset(
    (
        *("not", "if", "oneOf", "uniqueItems", "contains", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef"),
    )
)
"""Keywords that grammar libraries have not, or only in simple cases."""

OPTIONS = "x-guidance"
"""The key of a schema under which llguidance looks for its options."""

_DROPPED = ("then", "else", "minContains", "maxContains", "$dynamicAnchor", "$recursiveAnchor")
"""Keywords that mean something only beside others, and that grammar libraries refuse."""


@dataclass(slots=True, frozen=True)
class Rewritten:
    schema: Schema
    report: Report


def rewritten(schema: dict[str, Any]) -> Rewritten:
    """The schema with the keywords that grammar libraries enforce. One that has no others is
    returned as it is. Raises RequestError (400) for a schema that is not valid, or that nothing
    satisfies."""
    schema = _with_whole_counts(schema)
    if not needs_rewriting(schema):
        return Rewritten(schema, Report())
    try:
        document = Document(schema)
        writer = Writer(Shapes(document))
        found = writer.document(frozenset((Demand(document.root),)))
    except (TooLargeError, TooManyError):
        return _stripped(schema)
    except LoopError:
        raise RequestError(
            "the schema refers to itself without a property or an item between"
        ) from None
    except RecursionError:
        raise RequestError("references in the schema are nested too deep") from None
    if found is False:
        raise RequestError("no JSON value satisfies the schema")
    if isinstance(found, dict) and OPTIONS in schema:
        found[OPTIONS] = schema[OPTIONS]
    if len(json.dumps(found)) > MAX_CHARS["json_schema"]:
        return _stripped(schema)
    return Rewritten(found, writer.report)


def needs_rewriting(schema: Any) -> bool:
    """Whether a schema, or one inside it, has a keyword that grammar libraries do not enforce, or
    writes a count in a form that they refuse."""
    return any(
        key in REWRITTEN
        or key in _DROPPED
        or _is_float_count(key, value)
        or (key == "$id" and each is not schema)
        or _is_hard(each, key, value)
        for each, _ in schemas_in(schema)
        for key, value in each.items()
    )


def _with_whole_counts(schema: Any) -> Any:
    """The schema with counts such as 2.0, which JSON Schema allows, as integers."""
    if not any(
        _is_float_count(key, value) for each, _ in schemas_in(schema) for key, value in each.items()
    ):
        return schema
    return _mapped(
        schema,
        lambda each: {
            key: int(value) if _is_float_count(key, value) else value for key, value in each.items()
        },
    )


def _is_float_count(key: str, value: Any) -> bool:
    return key in COUNTS and isinstance(value, float) and value.is_integer()


def _is_hard(schema: dict[str, Any], key: str, value: Any) -> bool:
    """Whether a keyword that grammar libraries have is beyond them here."""
    match key:
        case "pattern":
            return isinstance(value, str) and not is_regular(value)
        case "patternProperties":
            return "properties" in schema or (
                isinstance(value, dict) and not all(map(is_regular, value))
            )
        case "minProperties" | "maxProperties":
            return "properties" in schema
        case "items":
            return isinstance(value, list)
        case "$schema":
            # The library looks for others where it must not: outside this machine.
            return not (isinstance(value, str) and "//json-schema.org/" in value)
        case "$ref":
            return isinstance(value, str) and not value.startswith("#")
    return False


def _stripped(schema: dict[str, Any]) -> Rewritten:
    """The schema without the keywords that would have been rewritten: its rewriting takes too much
    work."""
    report = Report()
    report.drop(
        Source(key, f"{path}/{key}")
        for each, path in schemas_in(schema)
        for key in each
        if key in REWRITTEN
    )
    return Rewritten(_mapped(schema, _without), report)


def _without(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without keywords that would be rewritten, and with anyOf instead of oneOf."""
    kept = {
        key: value for key, value in schema.items() if key not in REWRITTEN and key not in _DROPPED
    }
    if "oneOf" in schema and "anyOf" not in schema:
        kept["anyOf"] = schema["oneOf"]
    return kept


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with a change made to it and to those inside it."""
    if not isinstance(schema, dict):
        return schema
    found = change(schema)
    for key, value in found.items():
        if (key in MAPS or key == "dependencies") and isinstance(value, dict):
            found[key] = {name: _mapped(each, change) for name, each in value.items()}
        elif (key in LISTS or key == "items") and isinstance(value, list):
            found[key] = [_mapped(each, change) for each in value]
        elif key in SINGLE:
            found[key] = _mapped(value, change)
    return found
