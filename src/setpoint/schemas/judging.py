"""Whether a JSON value satisfies a schema, as far as that can be told in bounded time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from setpoint.schemas.document import Document, Node
from setpoint.schemas.expressions import is_found
from setpoint.schemas.values import constant, is_integral, is_multiple, kind_of_value

Verdict = bool | None
"""None: not known."""

UNKNOWN_KEYWORDS = ("unevaluatedItems", "unevaluatedProperties", "$recursiveRef")


def every(verdicts: Iterable[Verdict]) -> Verdict:
    """False as soon as one is, and not known if one is not."""
    found: Verdict = True
    for verdict in verdicts:
        if verdict is False:
            return False
        if verdict is None:
            found = None
    return found


def negated(verdict: Verdict) -> Verdict:
    return None if verdict is None else not verdict


def some(verdicts: Iterable[Verdict]) -> Verdict:
    return negated(every(negated(verdict) for verdict in verdicts))


class Validator:
    """spend: counts work, and raises if it was too much."""

    def __init__(self, document: Document, spend: Callable[[], None]) -> None:
        self._document = document
        self._spend = spend
        self._running: set[tuple[int, int]] = set()

    def verdict(self, number: int, value: Any) -> Verdict:
        """Whether the value satisfies the schema of this number."""
        self._spend()
        node = self._document.nodes[number]
        if isinstance(node.schema, bool):
            return node.schema
        key = (number, id(value))
        if key in self._running:
            return None  # a reference to itself; whoever expands the schema refuses it
        self._running.add(key)
        try:
            return every(
                (self._own(node, value), self._of_kind(node, value), self._combined(node, value))
            )
        finally:
            self._running.discard(key)

    def _inside(self, node: Node, value: Any, key: str, *steps: str | int) -> Verdict:
        return self.verdict(self._document.inside(node, key, *steps), value)

    def _own(self, node: Node, value: Any) -> Verdict:
        schema = node.schema
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            kind = kind_of_value(value)
            if kind not in names and not (
                "integer" in names and kind == "number" and is_integral(value)
            ):
                return False
        if "const" in schema and constant(schema["const"]) != constant(value):
            return False
        if "enum" in schema and constant(value) not in map(constant, schema["enum"]):
            return False
        return None if any(key in schema for key in UNKNOWN_KEYWORDS) else True

    def _of_kind(self, node: Node, value: Any) -> Verdict:
        match kind_of_value(value):
            case "number":
                return _number(node.schema, value)
            case "string":
                return _string(node.schema, value)
            case "array":
                return self._array(node, value)
            case "object":
                return self._object(node, value)
        return True

    def _array(self, node: Node, value: list[Any]) -> Verdict:
        schema = node.schema
        if not _is_between(len(value), schema, "Items"):
            return False
        if schema.get("uniqueItems") and len(set(map(constant, value))) < len(value):
            return False
        key = "prefixItems" if not isinstance(schema.get("items"), list) else "items"
        prefix, rest = schema.get(key, ()), "items" if key == "prefixItems" else "additionalItems"
        found = [
            self._inside(node, value[at], key, at) for at in range(min(len(prefix), len(value)))
        ]
        if rest in schema:
            found += [self._inside(node, each, rest) for each in value[len(prefix) :]]
        if "contains" in schema:
            which = [self._inside(node, each, "contains") for each in value]
            least, most = schema.get("minContains", 1), schema.get("maxContains", len(value))
            sure, possible = which.count(True), len(which) - which.count(False)
            if possible < least or sure > most:
                return False
            found.append(True if least <= sure and possible <= most else None)
        return every(found)

    def _object(self, node: Node, value: dict[str, Any]) -> Verdict:
        schema = node.schema
        if not _is_between(len(value), schema, "Properties"):
            return False
        if any(name not in value for name in schema.get("required", ())):
            return False
        found: list[Verdict] = []
        for name, each in value.items():
            is_listed: Verdict = name in schema.get("properties", ())
            if is_listed:
                found.append(self._inside(node, each, "properties", name))
            for pattern in schema.get("patternProperties", ()):
                match = is_found(pattern, name)
                if match is not False:
                    inside = self._inside(node, each, "patternProperties", pattern)
                    found.append(inside if match or inside else None)
                    is_listed = some((is_listed, match))
            if is_listed is not True and "additionalProperties" in schema:
                inside = self._inside(node, each, "additionalProperties")
                found.append(inside if is_listed is False or inside else None)
            if "propertyNames" in schema:
                found.append(self._inside(node, name, "propertyNames"))
        for key in ("dependentRequired", "dependencies", "dependentSchemas"):
            for name, needed in schema.get(key, {}).items():
                if name in value and isinstance(needed, list):
                    found.append(all(each in value for each in needed))
                elif name in value:
                    found.append(self._inside(node, value, key, name))
        return every(found)

    def _combined(self, node: Node, value: Any) -> Verdict:
        schema = node.schema
        found: list[Verdict] = []
        verdicts = {
            key: [self._inside(node, value, key, index) for index in range(len(schema[key]))]
            for key in ("allOf", "anyOf", "oneOf")
            if key in schema
        }
        found += verdicts.get("allOf", [])
        if "anyOf" in verdicts:
            found.append(some(verdicts["anyOf"]))
        if "oneOf" in verdicts:
            which = verdicts["oneOf"]
            unknown = None in which and which.count(True) < 2
            found.append(None if unknown else which.count(True) == 1)
        if "not" in schema:
            found.append(negated(self._inside(node, value, "not")))
        if "if" in schema:
            condition = self._inside(node, value, "if")
            then = self._inside(node, value, "then") if "then" in schema else True
            other = self._inside(node, value, "else") if "else" in schema else True
            found.append(
                every((then, other)) or None if condition is None else then if condition else other
            )
        for key in ("$ref", "$dynamicRef"):
            if key in schema:
                target = self._document.target(node, schema[key]) if key == "$ref" else None
                found.append(None if target is None else self.verdict(target, value))
        return every(found)


def _is_between(count: int, schema: dict[str, Any], what: str) -> bool:
    return bool(schema.get(f"min{what}", 0) <= count <= schema.get(f"max{what}", count))


def _number(schema: dict[str, Any], value: float) -> bool:
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and not ("exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"])
        and not ("exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"])
        and not ("multipleOf" in schema and not is_multiple(value, schema["multipleOf"]))
    )


def _string(schema: dict[str, Any], value: str) -> Verdict:
    if not _is_between(len(value), schema, "Length"):
        return False
    return is_found(schema["pattern"], value) if "pattern" in schema else True
