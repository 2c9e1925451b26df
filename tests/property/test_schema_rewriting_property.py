"""Random schemas over a tiny vocabulary, with jsonschema as the judge: the grammar of a rewritten
schema accepts no value that violates the schema, unless the client is told so; and every value that
satisfies it, unless the client is told so or the schema lists properties, which closes objects."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from setpoint.core.errors import RequestError
from setpoint.schemas.rewriting import needs_rewriting
from setpoint_testing.schema_grammar import SchemaGrammar

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, -1, 1.5, "", "a", "b", "ab", "ba"),
    *([], [1], [1, 1], ["a"], ["a", "b"], ["a", "a"], [1, "a"], [True, False], [1, 2, 3]),
    *({}, {"a": 1}, {"b": 1}, {"a": "a"}, {"a": 1, "b": 1}, {"a": 1, "b": 2, "c": 3}),
    *({"c": True}, {"a": {"a": 1}}, {"a": [1]}, [{"a": 1}], [[1]], {"b": 2, "c": 3}),
]
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
NAMES = "abc"
Draw = random.Random
Make = Callable[[Draw, Callable[[], Any]], dict[str, Any]]


def counts(*keywords: str, most: int = 3) -> Make:
    return lambda draw, inner: {draw.choice(keywords): draw.randrange(most + 1)}


def schemas(keyword: str) -> Make:
    return lambda draw, inner: {keyword: [inner() for _ in range(draw.randint(1, 3))]}


def schema(keyword: str) -> Make:
    return lambda draw, inner: {keyword: inner()}


def a_condition(draw: Draw, inner: Callable[[], Any]) -> dict[str, Any]:
    return {
        "if": inner(),
        **({"then": inner()} if draw.random() < 0.8 else {}),
        **({"else": inner()} if draw.random() < 0.6 else {}),
    }


def a_contains(draw: Draw, inner: Callable[[], Any]) -> dict[str, Any]:
    return {
        "contains": inner(),
        **({"minContains": draw.randrange(3)} if draw.random() < 0.4 else {}),
        **({"maxContains": draw.randint(1, 2)} if draw.random() < 0.4 else {}),
    }


def a_closed_object(draw: Draw, inner: Callable[[], Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: inner() for name in draw.sample(NAMES, 2)},
        "required": draw.sample(NAMES, draw.randint(1, 2)),
        "additionalProperties": False,
    }


def a_crowded_array(draw: Draw, inner: Callable[[], Any]) -> dict[str, Any]:
    """An array that its keywords often leave too little room for, which only their rewriting
    shows."""
    few = {"items": {"enum": draw.sample(VALUES, 2)}, "uniqueItems": True}
    demand = draw.choice([few, a_contains(draw, inner)])
    return {"type": "array", **demand, "minItems": draw.randrange(4)}


KEYWORDS: list[Make] = [
    lambda draw, inner: {"type": draw.choice(TYPES)},
    lambda draw, inner: {"properties": {name: inner() for name in draw.sample(NAMES, 2)}},
    lambda draw, inner: {"required": draw.sample(NAMES, draw.randint(1, 2))},
    lambda draw, inner: {"enum": draw.sample(VALUES, draw.choice([2, 5, 9]))},
    lambda draw, inner: {"uniqueItems": True},
    lambda draw, inner: {
        "propertyNames": draw.choice(
            [{"pattern": "^[ab]"}, {"enum": ["a", "c"]}, {"not": {"const": "a"}}, inner()]
        )
    },
    lambda draw, inner: {"dependentRequired": {draw.choice(NAMES): [draw.choice(NAMES)]}},
    lambda draw, inner: {"dependentSchemas": {draw.choice(NAMES): inner()}},
    lambda draw, inner: {"unevaluatedProperties": draw.choice([False, inner()])},
    lambda draw, inner: {"unevaluatedItems": draw.choice([False, inner()])},
    lambda draw, inner: {"patternProperties": {draw.choice(["^a", "b$"]): inner()}},
    counts("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    counts("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *map(schema, ("not", "items", "additionalProperties")),
    *map(schemas, ("oneOf", "anyOf", "allOf", "prefixItems")),
    a_condition,
    a_contains,
    a_closed_object,
    a_crowded_array,
]


def random_schema(draw: Draw, depth: int) -> Any:
    if depth == 0 or draw.random() < 0.12:
        value = draw.choice(VALUES)
        simple = [True, False, {"const": value}, {"pattern": "^a"}, {"type": draw.choice(TYPES)}]
        return draw.choice([*simple, {"required": [draw.choice(NAMES)]}, {"minimum": 1}])
    found: dict[str, Any] = {}
    for make in draw.choices(KEYWORDS, k=draw.randint(1, 3)):
        found |= make(draw, lambda: random_schema(draw, depth - 1))
    return found


def orders(value: Any) -> Iterator[Any]:
    """The value with its properties in every order: a grammar has them in one of its own."""
    if isinstance(value, dict):
        yield from map(dict, permutations(value.items()))
    else:
        yield value


def check(schema: Any) -> None:
    if not isinstance(schema, dict) or not needs_rewriting(schema):
        return
    judge = Draft202012Validator(schema)
    try:
        grammar = SchemaGrammar(schema)
    except RequestError as error:
        if "no JSON value satisfies" in error.message:
            assert not [value for value in VALUES if judge.is_valid(value)]
        return
    if grammar.report.unenforced:
        return
    is_whole = not grammar.report.warnings and "properties" not in json.dumps(schema)
    for value in VALUES:
        if judge.is_valid(value):
            assert not is_whole or any(map(grammar.accepts, orders(value))), value
        else:
            assert not grammar.accepts(value), value


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_the_grammar_is_the_schema(seed: int) -> None:
    check(random_schema(Draw(seed), depth=3))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_no_required_property_is_dropped(seed: int) -> None:
    draw = Draw(seed)

    def constant() -> dict[str, Any]:
        return {"const": draw.choice(VALUES)}

    check(a_closed_object(draw, lambda: draw.choice([True, a_crowded_array(draw, constant)])))


@pytest.mark.full
@settings(max_examples=5000, deadline=None)
@given(st.integers(0, 2**32))
def test_the_grammar_is_the_schema_of_many(seed: int) -> None:
    check(random_schema(Draw(seed), depth=3))
