"""Schemas that others are put together from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from setpoint.schemas.document import Schema

_DEPENDENT = (
    ("properties", "patternProperties", "additionalProperties"),
    ("prefixItems", "items", "additionalItems"),
)
"""Keywords that mean something else in another schema, beside others of their list."""


def objects(name: str, schema: Schema, *, required: Iterable[str] = ()) -> dict[str, Any]:
    """Objects whose property is of the schema, among any others."""
    return {
        **({"required": list(required)} if required else {}),
        "properties": {name: schema},
        "additionalProperties": True,
    }


def any_of(schemas: list[Schema]) -> Schema:
    """The values that satisfy one of these."""
    kept: list[Schema] = []
    for schema in schemas:
        is_choice = isinstance(schema, dict) and schema.keys() == {"anyOf"}
        kept += schema["anyOf"] if is_choice else [schema] if schema is not False else []  # type: ignore[index]
    if any(each is True or each == {} for each in kept):
        return True
    if not kept:
        return False
    return kept[0] if len(kept) == 1 else {"anyOf": kept}


def all_of(*schemas: Schema) -> Schema:
    """The values that satisfy all of these, without ``allOf`` if possible."""
    found: dict[str, Any] = {}
    for each in schemas:
        if each is False:
            return False
        if isinstance(each, dict):
            merged = _merged(found, each)
            if merged is None:
                merged = {**found, "allOf": [*found.get("allOf", ()), each]}
            found = merged
    return found or True


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """One schema that says what both say; None if a keyword cannot say both."""
    if one.keys() & _DEPENDENT[0] and other.get("additionalProperties") is True:
        other = {key: value for key, value in other.items() if key != "additionalProperties"}
    found = {**one, **other}
    if "required" in one and "required" in other:
        found["required"] = list(dict.fromkeys((*one["required"], *other["required"])))
    if "properties" in one and "properties" in other:
        if one["properties"].keys() & other["properties"].keys():
            return None
        found["properties"] = {**one["properties"], **other["properties"]}
    for first, *others in _DEPENDENT:
        if any(key in each for key in others for each in (one, other)) and all(
            each.keys() & {first, *others} for each in (one, other)
        ):
            return None
    for key in one.keys() & other.keys() - {"required", "properties"}:
        # True is equal to 1.
        if repr(one[key]) != repr(other[key]):
            return None
    return found
