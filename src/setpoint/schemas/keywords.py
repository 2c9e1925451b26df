"""What each keyword of JSON Schema allows, and what its opposite does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any, Protocol

from setpoint.schemas.atoms import (
    Arrays,
    Atom,
    Objects,
    Shape,
    Source,
    everything,
    losing,
    shape_of,
    union,
)
from setpoint.schemas.checks import check_keywords
from setpoint.schemas.document import Document, Node
from setpoint.schemas.evaluation import only_evaluated, unseen
from setpoint.schemas.limits import TooManyError
from setpoint.schemas.local_keywords import LocalKeywords
from setpoint.schemas.meeting import Judge
from setpoint.schemas.states import NOTHING, Demand

Part = tuple[str, Callable[[], Shape]]
"""A keyword, and the shape that it gives."""

_UNEVALUATED = (("unevaluatedProperties", Objects()), ("unevaluatedItems", Arrays()))

MAX_TOGETHER = 4
"""Most alternatives of an anyOf that are also taken together, which matters only where unevaluated
properties or items do."""


class Expanded(Judge, Protocol):
    """The shapes of other schemas, which a keyword needs."""

    def of_schema(self, demand: Demand) -> Shape: ...

    def met(self, first: Shape, second: Shape) -> Shape: ...

    def is_empty(self, shape: Shape) -> bool: ...

    def is_exact(self, atom: Atom) -> bool: ...

    def excludes(self, first: Shape, second: Shape) -> bool: ...


class Keywords:
    def __init__(self, document: Document, shapes: Expanded) -> None:
        self._document = document
        self._shapes = shapes
        self._local = LocalKeywords(document)
        self.evaluates = document.mentions("unevaluatedProperties", "unevaluatedItems")
        """Whether it matters which properties and items a schema evaluates."""

    def shape(self, demand: Demand) -> Shape:
        """Raises RequestError for a keyword with a wrong value."""
        node = self._document.nodes[demand.node]
        if isinstance(node.schema, bool):
            return everything() if node.schema == demand.holds else {}
        check_keywords(node.schema, node.path)
        return self._holding(node) if demand.holds else unseen(self._opposite(node))

    def _holding(self, node: Node) -> Shape:
        shape = self._local.shape(node, self._shapes)
        if not self.evaluates:
            shape = unseen(shape)
        for keyword, part in self._parts(node):
            shape = self._narrowed(shape, part, Source(keyword, f"{node.path}/{keyword}"))
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if keyword in node.schema:
                state = frozenset((Demand(self._document.inside(node, keyword)),))
                source = Source(keyword, f"{node.path}/{keyword}")
                shape = only_evaluated(shape, keyword, state, source)
        return shape

    def _narrowed(self, shape: Shape, part: Callable[[], Shape], source: Source) -> Shape:
        try:
            return self._shapes.met(shape, part())
        except TooManyError:
            return losing(shape, source)

    def _opposite(self, node: Node) -> Shape:
        shapes = list(self._local.opposites(node))
        shapes += [part() for _, part in self._opposite_parts(node)]
        for keyword, whole in (
            ("unevaluatedProperties", Objects()),
            ("unevaluatedItems", Arrays()),
        ):
            if keyword in node.schema:
                source = Source(keyword, f"{node.path}/{keyword}", is_opposite=True)
                shapes.append(losing(shape_of([whole]), source))
        return union(*shapes)

    def _of(self, node: Node, key: str, *steps: str | int, holds: bool = True) -> Shape:
        return self._shapes.of_schema(Demand(self._document.inside(node, key, *steps), holds))

    def _each(self, node: Node, key: str, *, holds: bool = True) -> list[Shape]:
        return [self._of(node, key, at, holds=holds) for at in range(len(node.schema[key]))]

    def _all(self, shapes: list[Shape]) -> Shape:
        found = everything()
        for shape in shapes:
            found = self._shapes.met(found, shape)
        return found

    # Keywords that apply schemas to the same value.

    def _parts(self, node: Node) -> Iterator[Part]:
        schema = node.schema
        for key in ("$ref", "$dynamicRef"):
            if key in schema:
                yield key, lambda key=key: self._referred(node, key, holds=True)  # type: ignore[misc]
        if "allOf" in schema:
            for index in range(len(schema["allOf"])):
                yield "allOf", lambda index=index: self._of(node, "allOf", index)  # type: ignore[misc]
        if "anyOf" in schema:
            yield "anyOf", lambda: self._any_of(node)
        if "oneOf" in schema:
            yield "oneOf", lambda: self._one_of(node)
        if "not" in schema:
            yield "not", lambda: self._of(node, "not", holds=False)
        if "if" in schema:
            yield "if", lambda: self._condition(node)
        for key, name in self._dependents(schema):
            yield key, lambda key=key, name=name: self._dependent(node, key, name)  # type: ignore[misc]

    def _opposite_parts(self, node: Node) -> Iterator[Part]:
        schema = node.schema
        for key in ("$ref", "$dynamicRef"):
            if key in schema:
                yield key, lambda key=key: self._referred(node, key, holds=False)  # type: ignore[misc]
        if "allOf" in schema:
            yield "allOf", lambda: union(*self._each(node, "allOf", holds=False))
        if "anyOf" in schema:
            yield "anyOf", lambda: self._all(self._each(node, "anyOf", holds=False))
        if "oneOf" in schema:
            yield "oneOf", lambda: self._none_or_several(node)
        if "not" in schema:
            yield "not", lambda: self._of(node, "not")
        if "if" in schema:
            yield "if", lambda: self._failed_condition(node)
        for key, name in self._dependents(schema):
            yield key, lambda key=key, name=name: self._failed_dependent(node, key, name)  # type: ignore[misc]

    def _referred(self, node: Node, key: str, *, holds: bool) -> Shape:
        reference = node.schema[key]
        target = self._document.target(node, reference)
        if key == "$dynamicRef" and target is not None:
            name = reference.rpartition("#")[2]
            others = self._document.dynamic.get(name, [])
            if target in others and len(others) > 1:
                target = None  # which one is meant depends on the way to it
        if target is None:
            source = Source(key, f"{node.path}/{key}", is_opposite=not holds)
            return losing(everything(), source)
        return self._shapes.of_schema(Demand(target, holds))

    def _any_of(self, node: Node) -> Shape:
        shapes = self._each(node, "anyOf")
        together: list[Shape] = []
        if self.evaluates and len(shapes) <= MAX_TOGETHER:
            for count in range(2, len(shapes) + 1):
                together += [self._all(list(some)) for some in combinations(shapes, count)]
        return union(*shapes, *together)

    def _one_of(self, node: Node) -> Shape:
        shapes = self._each(node, "oneOf")
        met, alone = self._shapes.met, []
        for index, shape in enumerate(shapes):
            for other, its in enumerate(shapes):
                if other == index or self._shapes.excludes(shape, its):
                    continue
                if not self._shapes.is_empty(met(shape, its)):
                    shape = met(shape, self._of(node, "oneOf", other, holds=False))
            alone.append(shape)
        return union(*alone)

    def _none_or_several(self, node: Node) -> Shape:
        shapes = self._each(node, "oneOf")
        none = self._all(self._each(node, "oneOf", holds=False))
        return union(none, *(self._shapes.met(*pair) for pair in combinations(shapes, 2)))

    def _branches(self, node: Node) -> tuple[Shape, Shape]:
        schema = node.schema
        return (
            self._of(node, "then") if "then" in schema else everything(),
            self._of(node, "else") if "else" in schema else everything(),
        )

    def _condition(self, node: Node) -> Shape:
        then, other = self._branches(node)
        if "then" not in node.schema and "else" not in node.schema and not self.evaluates:
            return everything()
        met = self._shapes.met
        # A condition lists no properties: it only asks about them.
        holds = _not_listing(self._of(node, "if"))
        if "then" not in node.schema and not self.evaluates:
            return union(holds, other)
        fails = self._of(node, "if", holds=False)
        exact: Shape = {}
        inexact: Shape = {}
        for kind, atoms in fails.items():
            for atom in atoms:
                into = exact if self._shapes.is_exact(atom) else inexact
                into[kind] = (*into.get(kind, ()), atom)
        source = Source("if", f"{node.path}/if")
        return union(
            met(holds, then), met(exact, other), self._unsure(inexact, then, other, source)
        )

    def _unsure(self, fails: Shape, then: Shape, other: Shape, source: Source) -> Shape:
        """What may come where no grammar has the opposite of a condition: values of both branches,
        which are valid in any case. Those of the second one alone are kept, too: what else is known
        of the value may make the opposite of the condition simple."""
        found: Shape = {}
        for kind, atoms in fails.items():
            alone = self._shapes.met({kind: atoms}, other)
            common = self._shapes.met(then, other).get(kind, ())
            if self._shapes.is_empty({kind: common}):
                found |= losing(alone, source)
            else:
                spare = tuple(
                    replace(atom, spare=atom.spare | {source}) for atom in alone.get(kind, ())
                )
                found[kind] = (*common, *spare)
        return found

    def _failed_condition(self, node: Node) -> Shape:
        found: list[Shape] = []
        if "then" in node.schema:
            failed = self._of(node, "then", holds=False)
            found.append(self._shapes.met(self._of(node, "if"), failed))
        if "else" in node.schema:
            failed = self._of(node, "else", holds=False)
            found.append(self._shapes.met(self._of(node, "if", holds=False), failed))
        return union(*found)

    @staticmethod
    def _dependents(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name in schema.get(key, ()):
                yield key, name

    def _dependent(self, node: Node, key: str, name: str) -> Shape:
        without: Shape = shape_of([absent(name)], other_kinds=True)
        return union(without, self._shapes.met(_present(name), self._needed(node, key, name)))

    def _failed_dependent(self, node: Node, key: str, name: str) -> Shape:
        failed = self._needed(node, key, name, holds=False)
        return self._shapes.met(_present(name), failed)

    def _needed(self, node: Node, key: str, name: str, *, holds: bool = True) -> Shape:
        needed = node.schema[key][name]
        if not isinstance(needed, list):
            return self._of(node, key, name, holds=holds)
        if holds:
            return shape_of([Objects(required=tuple(dict.fromkeys(needed)))])
        return shape_of([absent(each) for each in needed])


def absent(name: str) -> Objects:
    """Objects without a property."""
    return Objects(names=((name, NOTHING),))


def _present(name: str) -> Shape:
    return shape_of([Objects(required=(name,))])


def _not_listing(shape: Shape) -> Shape:
    return {
        kind: tuple(
            replace(atom, is_listed=False) if isinstance(atom, Objects) else atom for atom in atoms
        )
        for kind, atoms in shape.items()
    }
