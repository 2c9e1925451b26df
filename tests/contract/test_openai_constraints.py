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
]  # fmt: skip


def shown(constraint: Constraint | None) -> tuple[str, Any] | None:
    if constraint is None:
        return None
    is_json = constraint.kind in ("json_schema", "structural_tag")
    return constraint.kind, json.loads(constraint.text) if is_json else constraint.text


@pytest.mark.parametrize(("body", "constraint"), FORMS)
def test_the_engine_is_sent_the_constraint(serve: Serve, body: Any, constraint: Any) -> None:
    async def scenario(server: Any) -> None:
        for route, prompt in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": "a"})):
            response = await server.http.post(route, json={**prompt, **body})
            assert response.status_code == 200, response.text
            assert "warnings" not in response.json()["metadata"]
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
    ],
)
def test_wrong_constraints_are_refused_by_name(serve: Serve, body: Any, message: str) -> None:
    async def scenario(server: Any) -> None:
        for route, prompt in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": "a"})):
            response = await server.http.post(route, json={**prompt, **body})
            assert (response.status_code, response.json()["message"]) == (400, message)

    serve(scenario)
