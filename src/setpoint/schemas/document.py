"""A JSON schema as a list of numbered schemas, with what its references lead to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt

DEFINITIONS = ("$defs", "definitions")
MAPS = ("properties", "patternProperties", *DEFINITIONS, "dependentSchemas")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = (
    *("items", "additionalItems", "contains", "propertyNames", "additionalProperties"),
    *("unevaluatedItems", "unevaluatedProperties", "not", "if", "then", "else"),
)
"""Keywords whose value is a map of schemas, a list of schemas, or a schema. ``items`` was a list in
older drafts, and ``dependencies`` a map of schemas or lists of names."""


@dataclass(frozen=True, slots=True)
class Node:
    """One schema of the document."""

    schema: Any
    """An object, true or false."""
    path: str
    """JSON pointer, for the client."""
    base: str = ""
    """URI against which its references are resolved."""


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


class Document:
    """Numbers schemas as they are asked for. Raises RequestError (400) for a schema that is no
    object, true or false, and for references into nothing."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.nodes: list[Node] = []
        self._numbers: dict[tuple[int, str], int] = {}
        self._made: list[dict[str, Any]] = []
        self._keywords: set[str] = set()
        self._resources: dict[str, int] = {}
        """URI -> the schema that it is the ``$id`` of."""
        self._anchors: dict[tuple[str, str], int] = {}
        """(URI, name) -> the schema that has this ``$anchor``."""
        self.dynamic: dict[str, list[int]] = {}
        """Name -> the schemas that have this ``$dynamicAnchor``."""
        self.root = self.number(schema, "#", "")
        self._index()

    def number(self, schema: Any, path: str, base: str) -> int:
        """The number of a schema."""
        if not isinstance(schema, dict | bool):
            raise RequestError(f"{_shown(path)}: a schema must be an object, true or false")
        key = (id(schema), path)
        if key not in self._numbers:
            self._numbers[key] = len(self.nodes)
            self.nodes.append(Node(schema, path, base))
        return self._numbers[key]

    def number_of_value(self, value: Any, path: str) -> int:
        """The number of a schema that only this value satisfies."""
        self._made.append({"const": value})  # kept, because numbers go by the identity of schemas
        return self.number(self._made[-1], path, "")

    def mentions(self, *keywords: str) -> bool:
        """Whether a schema of the document has one of these keywords."""
        return not self._keywords.isdisjoint(keywords)

    def inside(self, node: Node, key: str, *steps: str | int) -> int:
        """The number of a schema inside another one: ``node.schema[key]...``."""
        schema, path = node.schema[key], f"{node.path}/{key}"
        for step in steps:
            schema, path = schema[step], f"{path}/{escaped(str(step))}"
        return self.number(schema, path, self._base(schema, node.base))

    def target(self, node: Node, reference: str) -> int | None:
        """The schema that a reference leads to; None if that is outside the document."""
        uri, fragment = urldefrag(urljoin(node.base, reference))
        if reference.startswith("#"):
            uri, fragment = node.base, reference[1:]
        root = self._resources.get(uri)
        if root is None:
            return None
        fragment = unquote(fragment)
        if not fragment:
            return root
        found = self._anchors.get((uri, fragment))
        if found is None and fragment.startswith("/"):
            found = self._pointed_to(self.nodes[root], fragment)
        if found is None:
            raise RequestError(
                f"{_shown(node.path)}/$ref: {excerpt(reference, 200)!r} leads to nothing"
            )
        return found

    def _pointed_to(self, root: Node, pointer: str) -> int | None:
        schema, path, base = root.schema, root.path, root.base
        for part in pointer[1:].split("/"):
            step = part.replace("~1", "/").replace("~0", "~")
            try:
                schema = schema[int(step)] if isinstance(schema, list) else schema[step]
            except (KeyError, IndexError, ValueError, TypeError):
                return None
            path, base = f"{path}/{escaped(step)}", self._base(schema, base)
        return self.number(schema, path, base)

    def _index(self) -> None:
        root = self.nodes[self.root]
        self._resources[""] = self.root
        todo = [(root.schema, root.path, root.base)]
        while todo:
            schema, path, base = todo.pop()
            base = self._base(schema, base)
            if not isinstance(schema, dict):
                continue
            self._keywords.update(schema)
            own_id = schema.get("$id")
            names = [schema.get(key) for key in ("$anchor", "$dynamicAnchor")]
            if isinstance(own_id, str) or any(isinstance(name, str) for name in names):
                number = self.number(schema, path, base)
                if isinstance(own_id, str):
                    self._resources.setdefault(base, number)
                    if number == self.root:
                        self._rebase_root(base)
                for name in names:
                    if isinstance(name, str):
                        self._anchors.setdefault((base, name), number)
                if isinstance(names[1], str):
                    self.dynamic.setdefault(names[1], []).append(number)
            todo += [(each, path + step, base) for step, each in parts_of(schema)]

    def _rebase_root(self, base: str) -> None:
        root = self.nodes[self.root]
        self.nodes[self.root] = Node(root.schema, root.path, base)

    @staticmethod
    def _base(schema: Any, base: str) -> str:
        own_id = schema.get("$id") if isinstance(schema, dict) else None
        return urldefrag(urljoin(base, own_id))[0] if isinstance(own_id, str) else base


def escaped(step: str) -> str:
    """A key as a step of a JSON pointer."""
    return step.replace("~", "~0").replace("/", "~1")


def _shown(path: str) -> str:
    return excerpt(path, 200)
