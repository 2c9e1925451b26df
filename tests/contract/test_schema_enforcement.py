"""JSON schemas of every API: rewritten before the engine sees them, with a warning about what no
grammar can enforce, or a refusal where the client asks for strictness."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from answers import says

from conftest import Server
from setpoint.core.errors import RequestError
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.json_array import required_calls
from setpoint.frontend.enforcement import Enforcement
from setpoint.frontend.telemetry.book import RequestBook
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
ROOM = 4096
FREE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
"""No grammar can hold any strings to being different."""
LISTED = {"type": "array", "items": {"oneOf": [{"const": "a"}, {"const": "b"}]}}
WHERE = "'uniqueItems' at #/uniqueItems"
CHAT = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}


def formatted(schema: Any, **more: Any) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, **more},
    }


def text_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": "answer", "schema": schema, **more}}


def posted(
    serve: Serve, engine: FakeEngine, route: str, body: dict[str, Any], **config: Any
) -> httpx.Response:
    """The answer to one body."""
    answers: list[httpx.Response] = []

    async def scenario(server: Server) -> None:
        answers.append(await server.http.post(route, json=body))

    serve(scenario, engine, **config)
    return answers[0]


def warnings_of(answer: dict[str, Any]) -> str:
    for place in (answer, answer.get("metadata") or {}, answer.get("meta_info") or {}):
        if place.get("warnings"):
            return str(place["warnings"])
    return ""


BODIES: dict[str, Any] = {
    "/v1/chat/completions": lambda schema: {**CHAT, "response_format": formatted(schema)},
    "/v1/completions": lambda schema: {"prompt": "Hi", "response_format": formatted(schema)},
    "/v1/responses": lambda schema: {"input": "Hi", "text": text_format(schema)},
    "/v1/messages": lambda schema: {
        **CHAT,
        "max_tokens": 9,
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    },
    "/generate": lambda schema: {"text": "Hi", "sampling_params": {"json_schema": schema}},
    "/api/chat": lambda schema: {**CHAT, "stream": False, "format": schema},
    "/api/generate": lambda schema: {
        "model": "default",
        "prompt": "Hi",
        "raw": True,
        "stream": False,
        "format": schema,
    },
}


@pytest.mark.parametrize("route", BODIES)
def test_what_no_grammar_enforces_is_a_warning(serve: Serve, route: str) -> None:
    engine = says("[]", context_len=ROOM)

    async def scenario(server: Server) -> None:
        response = await server.http.post(route, json=BODIES[route](FREE))
        assert response.status_code == 200, response.text
        assert WHERE in warnings_of(response.json())
        assert "uniqueItems" not in sent_schema(engine)
        info = (await server.http.get("/server_info")).json()
        assert json.dumps(info).count('"unenforced_schemas": 1') == 1

    serve(scenario, engine)


@pytest.mark.parametrize("route", BODIES)
def test_what_can_be_rewritten_is_enforced(serve: Serve, route: str) -> None:
    engine = says('["a"]', context_len=ROOM)
    response = posted(serve, engine, route, BODIES[route](LISTED))
    assert response.status_code == 200, response.text
    assert warnings_of(response.json()) == ""
    assert json.loads(sent_schema(engine)) == {
        "type": "array",
        "items": {"anyOf": [{"const": "a"}, {"const": "b"}]},
    }


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "response_format": formatted(FREE, strict=True)}),
        ("/v1/completions", {"prompt": "Hi", "response_format": formatted(FREE, strict=True)}),
        ("/v1/responses", {"input": "Hi", "text": text_format(FREE, strict=True)}),
    ],
)
def test_strict_refuses_it(serve: Serve, route: str, body: dict[str, Any]) -> None:
    engine = says("[]", context_len=ROOM)
    response = posted(serve, engine, route, body)
    assert response.status_code == 400
    assert WHERE in response.json()["message"]
    assert not engine.submitted


TOO_LARGE = {
    "type": "object",
    "allOf": [
        {"oneOf": [{"required": [f"{key}{number}"]} for number in range(60)]} for key in "abcdefgh"
    ],
}
"""Some grammar could enforce each part; the product of all alternatives exceeds the limits."""
LIMITED = "schema is too large for this server to enforce 'oneOf' at #/allOf/0/oneOf"


@pytest.mark.parametrize("strict", [False, True])
def test_a_schema_that_is_too_large_is_told_so(serve: Serve, strict: bool) -> None:
    """Red before: "no grammar can enforce 'oneOf'", which is not the reason."""
    body = {**CHAT, "response_format": formatted(TOO_LARGE, strict=strict)}
    response = posted(serve, says("{}", context_len=ROOM), "/v1/chat/completions", body)
    assert response.status_code == (400 if strict else 200), response.text
    told = response.json()["message"] if strict else warnings_of(response.json())
    assert LIMITED in told
    assert "o grammar can" not in told


TOOL = {
    "name": "tag",
    "parameters": {"type": "object", "properties": {"tags": FREE}, "required": ["tags"]},
}
IN_TOOL = "'uniqueItems' at #/properties/tags/uniqueItems"


def test_the_schema_of_a_strict_tool_is_refused(serve: Serve) -> None:
    engine = says("Hi", context_len=ROOM)
    tool = {"type": "function", "function": {**TOOL, "strict": True}}
    response = posted(
        serve, engine, "/v1/chat/completions", {**CHAT, "tools": [tool]}, tool_call_parser="qwen25"
    )
    assert response.status_code == 400
    assert "'tag'" in response.json()["message"]
    assert IN_TOOL in response.json()["message"]


def test_the_schema_of_a_tool_that_must_be_called_is_rewritten(serve: Serve) -> None:
    engine = says("Hi", context_len=ROOM)
    tool = {"type": "function", "function": TOOL}
    body = {**CHAT, "tools": [tool], "tool_choice": "required"}
    response = posted(serve, engine, "/v1/chat/completions", body, tool_call_parser="qwen25")
    assert response.status_code == 200, response.text
    assert IN_TOOL in warnings_of(response.json())
    assert "uniqueItems" not in str(engine.submitted[0].sampling.constraint)


def test_references_in_a_tools_schema_begin_at_its_own_root() -> None:
    """Red before: they began at the root of the array of calls, and led to nothing."""
    parameters = {
        "$defs": {"tag": {"enum": ["a", "b"]}},
        "type": "object",
        "properties": {"tag": {"$ref": "#/$defs/tag"}},
        "required": ["tag"],
    }
    _, calls = required_calls(None, [Tool("tag", parameters=parameters)], parallel=True)
    sampling = SamplingParams.parse({"structural_tag": calls})
    found, warnings = asyncio.run(Enforcement(RequestBook()).applied(sampling))
    assert warnings == []
    sent = json.loads(found.structural_tag or "")["format"]["json_schema"]
    place = ("items", "anyOf", "0", "properties", "parameters")
    assert sent["items"]["anyOf"][0]["properties"]["parameters"] == {
        **parameters,
        "properties": {"tag": {"$ref": "#/" + "/".join((*place, "$defs", "tag"))}},
    }


def test_a_clients_structural_tag_is_rewritten(serve: Serve) -> None:
    engine = says("Hi", context_len=ROOM)
    content = {"type": "json_schema", "json_schema": LISTED}
    tag = {"type": "structural_tag", "format": content}
    body = {"text": "Hi", "sampling_params": {"structural_tag": tag}}
    response = posted(serve, engine, "/generate", body)
    assert response.status_code == 200, response.text
    assert "oneOf" not in str(engine.submitted[0].sampling.structural_tag)


@pytest.mark.parametrize(
    "style", [{"type": "json_schema", "style": "qwen_xml"}, {"type": "qwen_xml_parameter"}]
)
def test_what_is_not_enforced_of_text_in_xml_is_named(serve: Serve, style: dict[str, Any]) -> None:
    """Red before: no warning."""
    properties = {
        "a": {"type": "string", "pattern": "^[0-9]$", "maxLength": 2},
        "b/c": {"type": "string", "format": "date"},
        "d": {"type": "string", "enum": ["x"]},
        "e": {"type": "integer", "minimum": 1},
    }
    tag = {**style, "json_schema": {"type": "object", "properties": properties}}
    text = json.dumps({"type": "structural_tag", "format": tag})
    body = {"text": "Hi", "sampling_params": {"structural_tag": text}}
    response = posted(serve, says("Hi", context_len=ROOM), "/generate", body)
    (warning,) = response.json()["meta_info"]["warnings"]
    for place in ("a/maxLength", "a/pattern", "b~1c/format"):
        assert f"'{place.split('/')[1]}' at #/properties/{place}" in warning
    assert "enum" not in warning
    assert "minimum" not in warning

    async def strictly() -> None:
        await Enforcement(RequestBook()).applied(SamplingParams(structural_tag=text), strict=True)

    with pytest.raises(
        RequestError, match="strict is true, but no grammar can enforce 'maxLength'"
    ):
        asyncio.run(strictly())


def test_integral_floats_count(serve: Serve) -> None:
    engine = says('"a"', context_len=ROOM)
    schema = {"type": "string", "maxLength": 2.0}
    response = posted(serve, engine, "/generate", BODIES["/generate"](schema))
    assert response.status_code == 200, response.text
    # As text: to Python 2.0 is equal to 2, but llguidance refuses it.
    assert sent_schema(engine) == '{"type": "string", "maxLength": 2}'


def test_a_hostile_schema_stops_nobody(serve: Serve) -> None:
    """Several large ones wait for each other in a thread; others are answered meanwhile."""
    engine = says("Hi", context_len=ROOM)
    choices = [{"anyOf": [{"required": [f"{n}_{k}"]} for k in range(10)]} for n in range(10)]
    hostile = [{"allOf": choices, "not": {"const": number}} for number in range(3)]

    async def scenario(server: Server) -> None:
        posts = [
            asyncio.create_task(server.http.post("/generate", json=BODIES["/generate"](schema)))
            for schema in hostile
        ]
        response = await server.http.post("/generate", json={"text": "Hi"})
        assert response.status_code == 200
        assert {post.status_code for post in await asyncio.gather(*posts)} == {200}

    serve(scenario, engine)


def test_no_value_satisfies_it(serve: Serve) -> None:
    engine = says("Hi", context_len=ROOM)
    response = posted(serve, engine, "/generate", BODIES["/generate"]({"not": {}}))
    assert response.status_code == 400
    assert response.json()["message"] == (
        "Failed to compile json grammar: no JSON value satisfies the schema"
    )


def sent_schema(engine: FakeEngine) -> str:
    """The schema under which the engine runs the last request."""
    return str(engine.submitted[-1].sampling.json_schema)
