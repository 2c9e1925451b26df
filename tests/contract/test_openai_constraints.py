"""Constraints on the output: which one the engine is sent for each form in which OpenAI's bodies
ask for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from answers import CHAT, HI, says

from setpoint.core.constraint import Constraint

Serve = Callable[..., None]

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
FORMS = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ("json_schema", {"type": "object"})),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        ("json_schema", SCHEMA),
    ),
    ({"response_format": TAG}, ("structural_tag", TAG)),
    ({"json_schema": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
    ({"json_schema": SCHEMA}, ("json_schema", SCHEMA)),
    ({"structural_tag": json.dumps(TAG)}, ("structural_tag", TAG)),
    ({"regex": "a+"}, ("regex", "a+")),
    ({"ebnf": 'root ::= "a"'}, ("ebnf", 'root ::= "a"')),
    # vLLM's keys. Red before: they were ignored with a warning, and the answer was unconstrained.
    ({"guided_json": SCHEMA}, ("json_schema", SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
    ({"guided_regex": "a+"}, ("regex", "a+")),
    ({"guided_grammar": 'start: "a"'}, ("ebnf", 'start: "a"')),
    ({"guided_choice": ["yes", "no (1.5)"]}, ("regex", r"yes|no \(1\.5\)")),
    ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA)),
    ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ("ebnf", 'root ::= "a"')),
    ({"structured_outputs": {"choice": ["b"]}}, ("regex", "b")),
    ({"structured_outputs": {"json_object": True}}, ("json_schema", {"type": "object"})),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, ("structural_tag", TAG)),
    ({"structured_outputs": None, "guided_choice": None}, None),
    ({"structured_outputs": {"json_object": False}}, None),
    # One constraint under several names. Red before: they could not be combined.
    ({"guided_grammar": "root ::= \"a\"", "structured_outputs": {"grammar": "root ::= \"a\""}}, ("ebnf", "root ::= \"a\"")),
    ({"guided_json": SCHEMA, "structured_outputs": {"json": json.dumps(SCHEMA)}}, ("json_schema", SCHEMA)),
    ({"regex": "a+", "guided_regex": "a+"}, ("regex", "a+")),
    (
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "guided_json": SCHEMA,
        },
        ("json_schema", SCHEMA),
    ),
]  # fmt: skip


def shown(constraint: Constraint | None) -> tuple[str, Any] | None:
    if constraint is None:
        return None
    is_json = constraint.kind in ("json_schema", "structural_tag")
    return constraint.kind, json.loads(constraint.text) if is_json else constraint.text


@pytest.mark.cases(14)
@pytest.mark.parametrize(("body", "constraint"), FORMS)
def test_the_engine_is_sent_the_constraint(serve: Serve, body: Any, constraint: Any) -> None:
    async def scenario(server: Any) -> None:
        for route, prompt in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": "a"})):
            response = await server.http.post(route, json={**prompt, **body})
            assert response.status_code == 200, response.text
            assert "warnings" not in response.json()
        for request in server.engine.submitted:
            assert shown(request.sampling.constraint) == constraint
            assert request.options.constrain_after == ()

    serve(scenario, says("ok"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"regex": "a", "ebnf": "b"},
            "Only one of json_schema, regex, ebnf, or structural_tag can be set.",
        ),
        (
            {"regex": "a", "response_format": {"type": "json_object"}},
            "response_format and regex cannot be combined.",
        ),
        ({"regex": 5}, "regex must be a string, got a whole number."),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type must be one of text, json_object, json_schema, structural_tag;"
            " got 'xml'.",
        ),
        ({"response_format": "json"}, "response_format must be an object, got a string."),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format and guided_regex cannot be combined.",
        ),
        ({"guided_regex": "a", "ebnf": "b"}, "ebnf and guided_regex cannot be combined."),
        (
            {"guided_regex": "a", "guided_choice": ["b"]},
            "guided_regex and guided_choice cannot be combined.",
        ),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs.json and structured_outputs.regex cannot be combined.",
        ),
        ({"guided_choice": []}, "guided_choice must not be empty."),
        ({"guided_choice": [1]}, "guided_choice[0] must be a string, got a whole number."),
        (
            {"guided_json": 5},
            "guided_json must be an object, or an object as JSON text, got a whole number.",
        ),
        (
            {"guided_regex": "a" * 20000},
            "guided_regex must have at most 16384 characters, got 20000.",
        ),
    ],
)
def test_wrong_constraints_are_refused_by_name(serve: Serve, body: Any, message: str) -> None:
    async def scenario(server: Any) -> None:
        for route, prompt in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": "a"})):
            response = await server.http.post(route, json={**prompt, **body})
            assert (response.status_code, response.json()["message"]) == (400, message)

    serve(scenario)
