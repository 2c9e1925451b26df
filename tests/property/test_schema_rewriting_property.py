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


def unenforced(draw: Draw, inner: Callable[[], Any]) -> dict[str, Any]:
    """One of the keywords that are never enforced, seldom: most schemas are to be enforced whole."""
    if draw.random() < 0.7:
        return {}
    keywords = ("contains", "unevaluatedItems", "unevaluatedProperties", "propertyNames", "not")
    return draw.choice([{"uniqueItems": True}, {draw.choice(keywords): inner()}])


def a_closed_object(draw: Draw, inner: Callable[[], Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: inner() for name in draw.sample(NAMES, 2)},
        "required": draw.sample(NAMES, draw.randint(1, 2)),
        "additionalProperties": False,
    }


KEYWORDS: list[Make] = [
    lambda draw, inner: {"type": draw.choice(TYPES)},
    lambda draw, inner: {"properties": {name: inner() for name in draw.sample(NAMES, 2)}},
    lambda draw, inner: {"required": draw.sample(NAMES, draw.randint(1, 2))},
    lambda draw, inner: {"enum": draw.sample(VALUES, draw.choice([2, 5, 9]))},
    lambda draw, inner: {
        "propertyNames": draw.choice(
            [{"type": "string"}, {"pattern": "^[ab]"}, {"enum": ["a", "c"]}]
        )
    },
    lambda draw, inner: {"dependentRequired": {draw.choice(NAMES): [draw.choice(NAMES)]}},
    lambda draw, inner: {"dependentSchemas": {draw.choice(NAMES): inner()}},
    lambda draw, inner: {"patternProperties": {draw.choice(["^a", "b$"]): inner()}},
    counts("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    counts("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *map(schema, ("not", "items", "additionalProperties")),
    *map(schemas, ("oneOf", "anyOf", "allOf", "prefixItems")),
    a_condition,
    a_closed_object,
    unenforced,
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
    # llguidance (1.9.1) does not find all objects of an enum whose names match an expression.
    text = json.dumps(schema)
    is_whole = "properties" not in text and "propertyNames" not in text
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
    impossible = [False, {"not": {}}, {"type": "null", "minimum": 1, "not": {"type": "null"}}]
    check(a_closed_object(draw, lambda: draw.choice([True, *impossible, random_schema(draw, 1)])))


@pytest.mark.full
@settings(max_examples=5000, deadline=None)
@given(st.integers(0, 2**32))
def test_the_grammar_is_the_schema_of_many(seed: int) -> None:
    check(random_schema(Draw(seed), depth=3))
