"""The keywords that speak of one type of values: what they allow, and what their opposites do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from setpoint.schemas.atoms import (
    WHOLE,
    Arrays,
    Atom,
    Contains,
    Expression,
    Numbers,
    Objects,
    Shape,
    Source,
    Strings,
    Values,
    shape_of,
)
from setpoint.schemas.document import Document, Node
from setpoint.schemas.expressions import is_found
from setpoint.schemas.meeting import Judge, meet
from setpoint.schemas.states import ANYTHING, NOTHING, Demand, State, both, opposite
from setpoint.schemas.values import KINDS, Constant, constant

MAX_MEMBERS = 32
"""Most items or properties of an excluded list or object."""


class LocalKeywords:
    def __init__(self, document: Document) -> None:
        self._document = document

    def _state(self, node: Node, key: str, *steps: str | int) -> State:
        return frozenset((Demand(self._document.inside(node, key, *steps)),))

    # What the keywords of a schema allow together.

    def shape(self, node: Node, judge: Judge) -> Shape:
        shape = _of_types(node.schema)
        atoms = (
            _numbers(node.schema),
            _strings(node),
            self._arrays(node),
            self._objects(node),
        )
        shape = meet(shape, shape_of(atoms, other_kinds=True), judge)
        for key in ("const", "enum"):
            if key in node.schema:
                values = [node.schema[key]] if key == "const" else node.schema[key]
                shape = meet(shape, _of_values(map(constant, values)), judge)
        return shape

    def _arrays(self, node: Node) -> Arrays:
        schema = node.schema
        prefix, rest = self._items(node)
        contains: frozenset[Contains] = frozenset()
        if "contains" in schema:
            least, most = schema.get("minContains", 1), schema.get("maxContains")
            state = self._state(node, "contains")
            source = Source("contains", f"{node.path}/contains")
            contains = frozenset((Contains(state, int(least), _count(most), source),))
        unique = Source("uniqueItems", f"{node.path}/uniqueItems")
        return Arrays(
            prefix,
            ANYTHING if rest is None else rest,
            int(schema.get("minItems", 0)),
            _count(schema.get("maxItems")),
            contains=contains,
            unique=frozenset((unique,) if schema.get("uniqueItems") else ()),
            seen_prefix=len(prefix),
            seen_all=rest is not None,
            seen_states=frozenset(each.state for each in contains),
        )

    def _items(self, node: Node) -> tuple[tuple[State, ...], State | None]:
        """The items at the beginning, and the others if the schema speaks of them."""
        schema = node.schema
        is_old = isinstance(schema.get("items"), list)
        first, others = ("items", "additionalItems") if is_old else ("prefixItems", "items")
        prefix = tuple(
            self._state(node, first, index) for index in range(len(schema.get(first, ())))
        )
        return prefix, self._state(node, others) if others in schema else None

    def _objects(self, node: Node) -> Objects:
        schema = node.schema
        patterns = [
            (
                Expression(each, Source("patternProperties", f"{node.path}/patternProperties")),
                self._state(node, "patternProperties", each),
            )
            for each in schema.get("patternProperties", ())
        ]
        lost: set[Source] = set()
        names: dict[str, State] = {}
        for name in schema.get("properties", ()):
            names[name] = self._state(node, "properties", name)
            for expression, state in patterns:
                match = is_found(expression.pattern, name)
                if match is None:
                    lost.add(expression.source)
                elif match:
                    names[name] = both(names[name], state)
        rest = ANYTHING
        if "additionalProperties" in schema:
            rest = self._state(node, "additionalProperties")
        keys = frozenset[tuple[State, Source]]()
        if "propertyNames" in schema:
            source = Source("propertyNames", f"{node.path}/propertyNames")
            keys = frozenset(((self._state(node, "propertyNames"), source),))
        speaking = ("additionalProperties", "patternProperties", "minProperties", "propertyNames")
        return Objects(
            tuple(names.items()),
            tuple(patterns),
            rest,
            tuple(dict.fromkeys(schema.get("required", ()))),
            int(schema.get("minProperties", 0)),
            _count(schema.get("maxProperties")),
            counts=frozenset(
                Source(key, f"{node.path}/{key}")
                for key in ("minProperties", "maxProperties")
                if key in schema
            ),
            keys=keys,
            seen_names=frozenset(names),
            seen_patterns=frozenset(each.pattern for each, _ in patterns),
            seen_all="additionalProperties" in schema,
            is_listed="properties" in schema,
            is_open=any(key in schema for key in speaking),
            lost=frozenset(lost),
        )

    # What violates one of them.

    def opposites(self, node: Node) -> Iterator[Shape]:
        schema = node.schema
        if "type" in schema:
            yield _of_other_types(schema, Source("type", f"{node.path}/type", is_opposite=True))
        for key in ("const", "enum"):
            if key in schema:
                values = [schema[key]] if key == "const" else schema[key]
                source = Source(key, f"{node.path}/{key}", is_opposite=True)
                yield self._other_than([constant(value) for value in values], source)
        yield shape_of(_opposite_numbers(node))
        yield shape_of(_opposite_strings(node))
        yield shape_of(self._opposite_arrays(node))
        yield shape_of(self._opposite_objects(node))

    def _opposite_arrays(self, node: Node) -> Iterator[Atom]:
        schema = node.schema
        prefix, rest = self._items(node)
        for index, state in enumerate(prefix):
            yield Arrays((*[ANYTHING] * index, opposite(state)), min_items=index + 1)
        if rest is not None:
            source = Source("items", f"{node.path}/items", is_opposite=True)
            violating = Contains(opposite(rest), 1, None, source, start=len(prefix))
            yield Arrays(contains=frozenset((violating,)))
        if schema.get("minItems", 0) > 0:
            yield Arrays(max_items=int(schema["minItems"]) - 1)
        if "maxItems" in schema:
            yield Arrays(min_items=int(schema["maxItems"]) + 1)
        if schema.get("uniqueItems"):
            yield Arrays(lost=_violated(node, "uniqueItems"))
        if "contains" in schema:
            least, most = int(schema.get("minContains", 1)), _count(schema.get("maxContains"))
            source = Source("contains", f"{node.path}/contains", is_opposite=True)
            state = self._state(node, "contains")
            if least > 0:
                yield Arrays(contains=frozenset((Contains(state, 0, least - 1, source),)))
            if most is not None:
                yield Arrays(contains=frozenset((Contains(state, most + 1, None, source),)))

    def _opposite_objects(self, node: Node) -> Iterator[Atom]:
        schema = node.schema
        for name in schema.get("properties", ()):
            state = opposite(self._state(node, "properties", name))
            yield Objects(names=((name, state),), required=(name,))
        for name in schema.get("required", ()):
            yield Objects(names=((name, NOTHING),))
        if schema.get("minProperties", 0) > 0:
            counts = _violated(node, "minProperties")
            yield Objects(max_properties=int(schema["minProperties"]) - 1, counts=counts)
        if "maxProperties" in schema:
            counts = _violated(node, "maxProperties")
            yield Objects(min_properties=int(schema["maxProperties"]) + 1, counts=counts)
        for key in ("patternProperties", "additionalProperties", "propertyNames"):
            if key in schema and schema[key] not in (True, {}):
                yield Objects(lost=_violated(node, key))

    def _other_than(self, values: list[Constant], source: Source) -> Shape:
        """Every value but these."""
        atoms: list[Atom] = []
        for kind in KINDS:
            own = [value for value in values if value.kind == kind]
            whole = WHOLE[kind]
            if not own:
                atoms.append(whole)
            elif isinstance(whole, Values):
                left = tuple(value for value in whole.values if value not in own)
                atoms += [Values(kind, left)] if left else []
            elif kind == "number":
                atoms += _numbers_between(sorted(value.value for value in own))
            elif kind == "string":
                atoms.append(Strings(no_texts=frozenset((each.value, source) for each in own)))
            elif len(own) == 1 and len(own[0].value) <= MAX_MEMBERS:
                members = self._other_arrays if kind == "array" else self._other_objects
                atoms += members(own[0].value, source)
            else:
                atoms.append(replace(whole, lost=frozenset((source,))))
        return shape_of(atoms)

    def _other_arrays(self, value: list[Any], source: Source) -> Iterator[Atom]:
        if value:
            yield Arrays(max_items=len(value) - 1)
        yield Arrays(min_items=len(value) + 1)
        for index, each in enumerate(value):
            state = self._not(each, f"{source.path}/{index}")
            yield Arrays((*[ANYTHING] * index, state), min_items=len(value), max_items=len(value))

    def _other_objects(self, value: dict[str, Any], source: Source) -> Iterator[Atom]:
        yield Objects(min_properties=len(value) + 1)
        for name, each in value.items():
            yield Objects(names=((name, NOTHING),))
            state = self._not(each, f"{source.path}/{name}")
            yield Objects(names=((name, state),), required=(name,))

    def _not(self, value: Any, path: str) -> State:
        return frozenset((Demand(self._document.number_of_value(value, path), holds=False),))


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _violated(node: Node, key: str) -> frozenset[Source]:
    return frozenset((Source(key, f"{node.path}/{key}", is_opposite=True),))


def _type_names(schema: dict[str, Any]) -> list[str]:
    names = schema.get("type", [*KINDS])
    return names if isinstance(names, list) else [names]


def _of_types(schema: dict[str, Any]) -> Shape:
    names = _type_names(schema)
    atoms = [WHOLE[kind] for kind in KINDS if kind in names]
    if "integer" in names and "number" not in names:
        atoms.append(Numbers(is_integer=True))
    return shape_of(atoms)


def _of_other_types(schema: dict[str, Any], source: Source) -> Shape:
    names = _type_names(schema)
    atoms = [WHOLE[kind] for kind in KINDS if kind not in names]
    if "integer" in names and "number" not in names:
        atoms.remove(WHOLE["number"])
        atoms.append(Numbers(no_integer=frozenset((source,))))
    return shape_of(atoms)


def _of_values(values: Iterator[Constant]) -> Shape:
    found: dict[Any, dict[Constant, None]] = {}
    for value in values:
        found.setdefault(value.kind, {})[value] = None
    return {kind: (Values(kind, tuple(own)),) for kind, own in found.items()}


def _numbers(schema: dict[str, Any]) -> Numbers:
    low, over = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, under = schema.get("maximum"), schema.get("exclusiveMaximum")
    whole = Numbers()
    lowest = max((each for each in (low, over) if each is not None), default=whole.low)
    highest = min((each for each in (high, under) if each is not None), default=whole.high)
    return Numbers(
        lowest,
        highest,
        low_excluded=over is not None and over == lowest,
        high_excluded=under is not None and under == highest,
        multiples=frozenset((schema["multipleOf"],) if "multipleOf" in schema else ()),
    )


def _strings(node: Node) -> Strings:
    schema = node.schema
    source = Source("pattern", f"{node.path}/pattern")
    given = schema.get("format")
    return Strings(
        int(schema.get("minLength", 0)),
        _count(schema.get("maxLength")),
        patterns=frozenset((Expression(schema["pattern"], source),) if "pattern" in schema else ()),
        formats=frozenset((given,) if isinstance(given, str) else ()),
    )


def _opposite_numbers(node: Node) -> Iterator[Atom]:
    schema = node.schema
    if "minimum" in schema:
        yield Numbers(high=schema["minimum"], high_excluded=True)
    if "maximum" in schema:
        yield Numbers(low=schema["maximum"], low_excluded=True)
    if "exclusiveMinimum" in schema:
        yield Numbers(high=schema["exclusiveMinimum"])
    if "exclusiveMaximum" in schema:
        yield Numbers(low=schema["exclusiveMaximum"])
    if "multipleOf" in schema:
        (source,) = _violated(node, "multipleOf")
        yield Numbers(no_multiples=frozenset(((schema["multipleOf"], source),)))


def _numbers_between(excluded: list[float]) -> Iterator[Atom]:
    whole = Numbers()
    edges = [whole.low, *excluded, whole.high]
    for low, high in pairwise(edges):
        yield Numbers(low, high, low_excluded=low != whole.low, high_excluded=high != whole.high)


def _opposite_strings(node: Node) -> Iterator[Atom]:
    schema = node.schema
    if schema.get("minLength", 0) > 0:
        yield Strings(max_length=int(schema["minLength"]) - 1)
    if "maxLength" in schema:
        yield Strings(min_length=int(schema["maxLength"]) + 1)
    if "pattern" in schema:
        (source,) = _violated(node, "pattern")
        yield Strings(no_patterns=frozenset((Expression(schema["pattern"], source),)))
    if isinstance(schema.get("format"), str):
        yield Strings(lost=_violated(node, "format"))
