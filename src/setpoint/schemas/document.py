"""The schemas inside a JSON schema, and what its references lead to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

DEFINITIONS = ("$defs", "definitions")
MAPS = ("properties", "patternProperties", *DEFINITIONS, "dependentSchemas")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = (
    *("items", "additionalItems", "contains", "propertyNames", "additionalProperties"),
    *("unevaluatedItems", "unevaluatedProperties", "not", "if", "then", "else"),
)
"""Keywords whose value is a map of schemas, a list of schemas, or a schema. ``items`` was a list in
older drafts, and ``dependencies`` a map of schemas or lists of names."""

_IN_PLACE = ("allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas")

Schema = dict[str, Any] | bool


def parts_of(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, with their relative JSON pointers."""
    for key, value in schema.items():
        if (key in MAPS or key == "dependencies") and isinstance(value, dict):
            for name, each in value.items():
                if not (key == "dependencies" and isinstance(each, list)):
                    yield f"/{key}/{escaped(name)}", each
        elif (key in LISTS or key == "items") and isinstance(value, list):
            for index, each in enumerate(value):
                yield f"/{key}/{index}", each
        elif key in SINGLE:
            yield f"/{key}", value


def schemas_in(schema: Any) -> list[tuple[dict[str, Any], str]]:
    """A schema and those inside it that are objects, each with its JSON pointer."""
    found, todo = [], [(schema, "#")]
    while todo:
        each, path = todo.pop()
        if isinstance(each, dict):
            found.append((each, path))
            todo += [(inner, path + step) for step, inner in parts_of(each)]
    return found


class References:
    """What the references in a schema lead to."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._bases: dict[int, str] = {}
        """The URI against which the reference of a schema is resolved."""
        self._places: dict[tuple[str, str], tuple[Any, str]] = {}
        """(URI, "" or an anchor) -> the schema there, and its JSON pointer."""
        self._recursive: dict[int, bool] = {}
        self._index(root, "#", "")
        self._places[self._bases[id(root)], ""] = self._places["", ""] = (root, "#")

    def _index(self, schema: Any, path: str, base: str) -> None:
        todo = [(schema, path, base)]
        while todo:
            schema, path, base = todo.pop()
            if not isinstance(schema, dict) or id(schema) in self._bases:
                continue
            if isinstance(schema.get("$id"), str):
                base = urldefrag(urljoin(base, schema["$id"]))[0]
                self._places.setdefault((base, ""), (schema, path))
            self._bases[id(schema)] = base
            for key in ("$anchor", "$dynamicAnchor"):
                if key in schema:
                    self._places.setdefault((base, str(schema[key])), (schema, path))
            todo += [(each, path + step, base) for step, each in parts_of(schema)]

    def place(self, schema: dict[str, Any]) -> tuple[Any, str] | None:
        """What the ``$ref`` of a schema leads to, and its JSON pointer; None if it is unknown."""
        base, reference = self._bases[id(schema)], schema["$ref"]
        uri, fragment = urldefrag(urljoin(base, reference))
        if reference.startswith("#"):
            uri, fragment = base, reference[1:]
        fragment = unquote(fragment)
        if not fragment.startswith("/"):
            return self._places.get((uri, fragment))
        found, path = self._places.get((uri, ""), (None, ""))
        for part in fragment[1:].split("/"):
            step = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(step)] if isinstance(found, list) else found[step]
            except (KeyError, IndexError, ValueError, TypeError):
                return None
            path += f"/{escaped(step)}"
        self._index(found, path, uri)  # a place may be outside of the keywords that have schemas
        return (found, path) if isinstance(found, dict | bool) else None

    def target(self, schema: dict[str, Any]) -> Any:
        """What the ``$ref`` of a schema leads to; None if it is unknown."""
        place = self.place(schema)
        return None if place is None else place[0]

    def is_recursive(self, schema: Any) -> bool:
        """Whether a schema is, or refers to, one that has itself inside."""
        if id(schema) not in self._recursive:
            self._recursive[id(schema)] = True  # what is asked again while it is looked at
            inner = [part for _, part in parts_of(schema)] if isinstance(schema, dict) else []
            if isinstance(schema, dict) and "$ref" in schema:
                inner.append(self.target(schema))
            self._recursive[id(schema)] = any(map(self.is_recursive, inner))
        return self._recursive[id(schema)]

    def in_place(self, schema: dict[str, Any]) -> list[Any]:
        """The schemas that apply to the same value as the schema; None for an unknown one."""
        found = []
        for step, each in parts_of(schema):
            if step.split("/")[1] in _IN_PLACE:
                found.append(each)
        return [*found, self.target(schema)] if "$ref" in schema else found

    def all_in_place(self, schemas: list[Any]) -> list[Any]:
        """The schemas, and all that apply to the same values as they do, each of them once."""
        found: dict[int, Any] = {}
        todo = list(schemas)
        while todo:
            each = todo.pop()
            if id(each) not in found:
                found[id(each)] = each
                todo += self.in_place(each) if isinstance(each, dict) else []
        return list(found.values())


def escaped(step: str) -> str:
    """A key as a step of a JSON pointer."""
    return step.replace("~", "~0").replace("/", "~1")
