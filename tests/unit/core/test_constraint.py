"""The sampling parameters that constrain an output: their forms, their limits, and one at a time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from setpoint.core.constraint import KINDS, MAX_CHARS, Constraint
from setpoint.core.errors import RequestError
from setpoint.core.sampling import SamplingParams


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_the_constraint_of_its_request(kind: str) -> None:
    sampling = SamplingParams.parse({kind: "x"})
    assert sampling.constraint == Constraint(kind, "x")  # type: ignore[arg-type]
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams)
    assert again == sampling


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_objects_become_json(kind: str) -> None:
    value = {"type": "object", "title": "Größe"}
    sampling = SamplingParams.parse({kind: value})
    assert sampling.constraint is not None
    assert msgspec.json.decode(sampling.constraint.text) == value


@pytest.mark.parametrize("kind", KINDS)
def test_null_constrains_nothing_and_an_empty_text_is_refused(kind: str) -> None:
    """Red before: an empty text was ignored, and the answer was free text."""
    assert SamplingParams.parse({kind: None}).constraint is None
    with pytest.raises(RequestError, match=f"{kind} is empty, which constrains nothing. Leave it"):
        SamplingParams.parse({kind: ""})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"regex": "a", "ebnf": "b"}, "Only one of json_schema, regex, ebnf, or structural_tag"),
        ({"json_schema": [1]}, "json_schema must be an object, or an object as JSON text"),
        ({"structural_tag": True}, "structural_tag must be an object"),
        ({"json_schema": {"a": object()}}, "json_schema cannot be encoded as JSON"),
        ({"regex": 1}, "regex must be a string, got a whole number"),
        ({"ebnf": {"root": "a"}}, "ebnf must be a string, got an object"),
        ({"regex": "a\0"}, "regex must not contain a NUL character"),
        ({"regex": "x" * (MAX_CHARS["regex"] + 1)}, "regex must have at most 16384 characters"),
        ({"ebnf": "x" * (MAX_CHARS["ebnf"] + 1)}, "ebnf must have at most 262144 characters"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams.parse(values)
