"""A client's schema as grammar libraries enforce it: one walk for all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from setpoint.core.constraint import MAX_CHARS
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt, quoted
from setpoint.schemas.checks import COUNTS
from setpoint.schemas.document import (
    DEFINITIONS,
    LISTS,
    MAPS,
    SINGLE,
    References,
    Schema,
    escaped,
    schemas_in,
)
from setpoint.schemas.expressions import is_regular
from setpoint.schemas.forms import all_of, any_of, objects
from setpoint.schemas.opposites import NoOpposite, Opposites, allows_all
from setpoint.schemas.overlaps import Overlaps, listed
from setpoint.schemas.report import LossReport, SchemaKeyword

MAX_STEPS = 20_000
"""Most steps of work for one schema, each some ten microseconds."""

OPTIONS = "x-guidance"
"""The key of a schema under which llguidance looks for its options."""

_DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
_REWRITTEN = ("not", "if", "oneOf", "propertyNames", *_DEPENDENT)
_LOST = (
    *("uniqueItems", "contains", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef"),
)
"""Keywords that no grammar library has, and that are not rewritten."""
_DROPPED = (
    *("then", "else", "minContains", "maxContains", "$dynamicAnchor", "$recursiveAnchor"),
    *_LOST,
    *_REWRITTEN,
)
_KEPT = (
    *("properties", *DEFINITIONS, "anyOf", "allOf", "prefixItems"),
    *("items", "additionalItems", "additionalProperties"),
)
"""Keywords that are written where they were, with the schemas inside."""


class TooLargeError(Exception):
    """The schema takes too much work."""


@dataclass(slots=True, frozen=True)
class Rewritten:
    schema: Schema
    report: LossReport


def rewritten(schema: dict[str, Any]) -> Rewritten:
    """The schema with the keywords that grammar libraries enforce. One that has no others is
    returned as it is. Raises RequestError (400) for a schema that nothing satisfies."""
    if not needs_rewriting(schema):
        return Rewritten(schema, LossReport())
    try:
        rewriter = _Rewriter(schema)
        found = rewriter.document(schema)
    except TooLargeError:
        rewriter = _Rewriter(schema, is_too_large=True)
        found = rewriter.document(schema)
    if found is False:
        raise RequestError("no JSON value satisfies the schema")
    if len(json.dumps(found)) > MAX_CHARS["json_schema"]:
        rewriter = _Rewriter(schema, is_too_large=True)
        found = rewriter.document(schema)
    # A request may have only an object as its schema.
    return Rewritten({} if found is True else found, rewriter.report)


def needs_rewriting(schema: Any) -> bool:
    """Whether a schema, or one inside it, has a keyword that grammar libraries do not enforce, or
    writes a count in a form that they refuse."""
    return any(
        _is_hard(each, key, value, is_root=each is schema)
        for each, _ in schemas_in(schema)
        for key, value in each.items()
    )


def _is_hard(schema: dict[str, Any], key: str, value: Any, *, is_root: bool = False) -> bool:
    """Whether a keyword is beyond grammar libraries, here or anywhere."""
    match key:
        case "pattern":
            return not is_regular(value)
        case "patternProperties":
            return not all(map(is_regular, value))
        case "minProperties" | "maxProperties":
            return "properties" in schema or isinstance(value, float)
        case "$schema":
            # The library looks for others where it must not: outside this machine.
            return not (isinstance(value, str) and "//json-schema.org/" in value)
        case "$ref":
            return not value.startswith("#")
        case "$id":
            return not is_root
    return key in _DROPPED or (key in COUNTS and isinstance(value, float))


class _Rewriter:
    """is_too_large: whether no keyword is rewritten, because that would take too much work."""

    def __init__(self, schema: dict[str, Any], *, is_too_large: bool = False) -> None:
        self.report = LossReport()
        self._is_too_large = is_too_large
        self._num_steps = 0
        self._references = references = References(schema)
        self._moved: dict[str, tuple[str, Any]] = {}
        """Pointers to where the written schema has nothing -> names under ``$defs``, schemas."""
        self._overlaps = Overlaps(references, self._spend)
        self._opposites = Opposites(references, self._overlaps, self.written, self._spend)

    def _spend(self) -> None:
        self._num_steps += 1
        if self._num_steps > MAX_STEPS and not self._is_too_large:
            raise TooLargeError

    def _lose(self, key: str, path: str) -> None:
        self.report.lose((SchemaKeyword(key, f"{path}/{key}"),))

    def written(self, schema: Any, path: str) -> Schema:
        """The schema at a path. What is not enforced goes to the report."""
        self._spend()
        if isinstance(schema, bool):
            return schema
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            inner = f"{path}/{key}"
            if key in COUNTS and isinstance(value, float):
                value = int(value)
            if key in _DROPPED:
                if key in _LOST and not allows_all(key, value):
                    self._lose(key, path)
            elif key == "pattern" and _is_hard(schema, key, value):
                self._lose(key, path)
            elif key == "patternProperties" and _is_hard(schema, key, value):
                self._lose(key, path)
                value = {each: inner for each, inner in value.items() if is_regular(each)}
                kept[key] = self._written_map(value, inner)
            elif key in MAPS and isinstance(value, dict):
                kept[key] = self._written_map(value, inner)
            elif (key in LISTS or key == "items") and isinstance(value, list):
                kept[key] = [self.written(each, f"{inner}/{at}") for at, each in enumerate(value)]
            elif key in SINGLE:
                kept[key] = self.written(value, inner)
            elif key == "$ref":
                if not self._refer(schema, kept, path):
                    return False
            elif key == "$id" and path != "#":
                pass  # its references are written from the root
            elif key != "$schema" or not _is_hard(schema, key, value):
                kept[key] = value
        self._count(kept, path)
        return all_of(kept, *self._added(schema, kept, path))

    def document(self, schema: dict[str, Any]) -> Schema:
        """The whole schema, with what was moved."""
        found = self.written(schema, "#")
        if not (self._moved and isinstance(found, dict)):
            return found
        definitions = dict(found.get("$defs", {}))
        pointers = list(self._moved)
        for pointer in pointers:
            name, target = self._moved[pointer]
            definitions[name] = self.written(target, pointer)
            pointers += list(self._moved)[len(pointers) :]
        return {**found, "$defs": definitions}

    def _refer(self, schema: dict[str, Any], kept: dict[str, Any], path: str) -> bool:
        """Write a reference from the root. False: nothing satisfies what it leads to."""
        place = self._references.place(schema)
        if place is None:
            if not schema["$ref"].startswith("#"):
                self._lose("$ref", path)
                return True
            raise RequestError(
                f"{excerpt(path, 200)}/$ref: {quoted(schema['$ref'], 200)} leads to nothing"
            )
        if not self._is_too_large and not self._overlaps.kinds_of_target(schema):
            return False
        target, pointer = place
        if not _is_kept(pointer):
            name, _ = self._moved.setdefault(pointer, (f"moved-{len(self._moved)}", target))
            pointer = f"#/$defs/{name}"
        kept["$ref"] = quote(pointer, safe="#/~$")
        return True

    def _written_map(self, schemas: dict[str, Any], path: str) -> dict[str, Schema]:
        return {
            name: self.written(each, f"{path}/{escaped(name)}") for name, each in schemas.items()
        }

    def _added(self, schema: dict[str, Any], kept: dict[str, Any], path: str) -> Iterator[Schema]:
        """What the keywords of a schema that grammar libraries have not say in others."""
        for key in _REWRITTEN:
            if key not in schema:
                continue
            if self._is_too_large:
                self.report.too_large[SchemaKeyword(key, f"{path}/{key}")] = None
                if key == "oneOf":
                    yield self._one_of(schema, path, is_any=True)
                continue
            try:
                match key:
                    case "oneOf":
                        yield self._one_of(schema, path)
                    case "not":
                        yield self._opposites.of(
                            schema["not"], f"{path}/not", self._overlaps.kinds(schema)
                        )
                    case "if":
                        yield self._condition(schema, path)
                    case "propertyNames":
                        self._name(schema["propertyNames"], kept)
                    case _:
                        yield from self._dependents(schema[key], f"{path}/{key}")
            except NoOpposite:
                self._lose(key, path)
                if key == "oneOf":
                    yield self._one_of(schema, path, is_any=True)

    def _one_of(self, schema: dict[str, Any], path: str, *, is_any: bool = False) -> Schema:
        """The alternatives, each without the values of those that do not exclude it."""
        alternatives, found = schema["oneOf"], []
        for index, each in enumerate(alternatives):
            others = []
            if not is_any:
                kinds = self._overlaps.kinds(schema) & self._overlaps.kinds(each)
                others = [
                    self._opposites.of(other, f"{path}/oneOf/{at}", kinds)
                    for at, other in enumerate(alternatives)
                    if at != index and not self._overlaps.exclude(each, other, kinds)
                ]
            if others and self._references.is_recursive(each):
                raise NoOpposite  # llguidance puts nothing together with a schema that has no end
            found.append(all_of(self.written(each, f"{path}/oneOf/{index}"), *others))
        return any_of(found)

    def _condition(self, schema: dict[str, Any], path: str) -> Schema:
        if "then" not in schema and "else" not in schema:
            return True
        kinds = self._overlaps.kinds(schema)
        fails = self._opposites.of(schema["if"], f"{path}/if", kinds)
        holds = self.written(schema["if"], f"{path}/if")
        if isinstance(holds, dict) and "properties" in holds:
            holds = {"additionalProperties": True, **holds}  # it lists none: it asks about them
        then = self.written(schema.get("then", True), f"{path}/then")
        other = self.written(schema.get("else", True), f"{path}/else")
        return any_of([all_of(holds, then), all_of(fails, other)])

    def _dependents(self, dependents: dict[str, Any], path: str) -> Iterator[Schema]:
        for name, needed in dependents.items():
            if isinstance(needed, list):
                present: Schema = {"required": list(dict.fromkeys((name, *needed)))}
            else:
                inner = self.written(needed, f"{path}/{escaped(name)}")
                present = all_of({"required": [name]}, inner)
            yield any_of([objects(name, False), present])

    def _name(self, names: Any, kept: dict[str, Any]) -> None:
        """Put what a schema says of the names of properties into other keywords. Raises
        NoOpposite."""
        if isinstance(names, dict) and names.keys() == {"$ref"}:
            names = self._references.target(names)
        if isinstance(names, bool):
            names = {} if names else {"enum": []}
        rules = names.keys() & {
            *COUNTS, *_DROPPED, *LISTS, "pattern", "format", "$ref", "const", "enum"
        }  # fmt: skip
        if "string" not in self._overlaps.kinds({"type": names.get("type", "string")}):
            raise NoOpposite
        if not rules:
            return
        rest = kept.get("additionalProperties", True)
        if "properties" in kept or "patternProperties" in kept:
            raise NoOpposite
        if rules == {"pattern"} and is_regular(names["pattern"]):
            kept["patternProperties"] = {names["pattern"]: rest}
        elif rules in ({"enum"}, {"const"}):
            texts = [each for each in listed(names) or () if isinstance(each, str)]
            kept["properties"] = dict.fromkeys(texts, rest)
        else:
            raise NoOpposite
        kept["additionalProperties"] = False

    def _count(self, kept: dict[str, Any], path: str) -> None:
        """Keep the numbers of properties where llguidance counts: it counts no optional ones, but
        knows "at least one" and "at most one" of an object that has no others."""
        if "properties" not in kept:
            return
        required = set(kept.get("required", ()))
        possible = {name for name, each in kept["properties"].items() if each is not False}
        is_closed = kept.get("additionalProperties", True) is False and not kept.get(
            "patternProperties"
        )
        if kept.get("minProperties", 0) <= len(required):
            kept.pop("minProperties", None)
        if is_closed and kept.get("maxProperties", 0) >= len(possible):
            kept.pop("maxProperties", None)
        if possible <= required:
            return
        limits = {"minProperties", "maxProperties"} & kept.keys()
        is_one = all(kept[key] - len(required) == 1 for key in limits)
        if is_one and limits and "additionalProperties" not in kept:
            kept["additionalProperties"] = False
        elif not (is_one and is_closed):
            for key in sorted(limits):
                self._lose(key, path)
                del kept[key]


def _is_kept(reference: str) -> bool:
    """Whether a pointer leads through keywords that are written where they were."""
    steps, at = reference.split("/")[1:], 0
    while at < len(steps):
        if steps[at] not in _KEPT:
            return False
        at += 1 + (steps[at] in MAPS or steps[at] in LISTS)
    return True
