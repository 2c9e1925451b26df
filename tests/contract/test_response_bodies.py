"""Bodies of ``/v1/responses`` that cannot be honoured: always 400 with the field's name, in the
nested shape of an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from answers import says
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Serve = Callable[..., None]

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
REFUSED = [
    ({}, "input is missing"),
    ({"input": None}, "input must be"),
    ({"input": []}, "input must not be empty"),
    ({"input": ["hi"]}, "input[0] must be an object"),
    ({"input": [{"role": "narrator", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content is missing"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content must not be an empty list"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]: this model reads only text parts",
    ),
    ({"input": [USER, {"type": 5, "id": "x"}]}, "input[1].type"),
    ({"input": [USER, {"type": "item_reference"}]}, "input[1].id must be a string"),
    ({"input": [USER, {"type": "function_call", "name": "f"}]}, "input[1].call_id is missing"),
    (
        {"input": [USER, {"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input[1].call_id is 'c', but no earlier call has that id",
    ),
    (
        {"input": [USER, CALL, {"type": "function_call_output", "call_id": "c", "output": 1}]},
        "input[2].output",
    ),
    ({"input": [{"role": "system", "content": "x"}]}, "at least one user message"),
    ({"input": "x", "instructions": 1}, "instructions must be a string"),
    ({"input": "x", "tools": [{"type": 5}]}, "tools[0].type must be a string"),
    ({"input": "x", "tools": [{"type": "custom"}]}, "tools[0].name is missing"),
    (
        {
            "input": "x",
            "tools": [
                {
                    "type": "custom",
                    "name": "a",
                    "format": {"type": "grammar", "syntax": "yacc", "definition": "a"},
                }
            ],
        },
        "tools[0].format.syntax must",
    ),
    ({"input": "x", "tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools is missing"),
    (
        {
            "input": "x",
            "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}],
        },
        "tools[0].tools[0].name is missing",
    ),
    (
        {"input": "x", "tools": [{"type": "local_shell"}, {"type": "local_shell"}]},
        "tools[1]: two tools have the name 'local_shell'",
    ),
    (
        {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"},
        "tools is empty",
    ),
    ({"input": "x", "tools": [1]}, "tools[0].type"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name is missing"),
    ({"input": "x", "tools": [{"type": "function", "name": "f"}] * 2}, "tools[1]: two tools"),
    ({"input": "x", "tool_choice": "sometimes"}, "tool_choice must be"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice must be"),
    (
        {"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [1]}},
        "tool_choice.tools[0]",
    ),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type must be"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format must be like"),
    ({"input": "x", "text": {"verbosity": "loud"}}, "text.verbosity"),
    (
        {"input": "x", "text": {"format": {"type": "json_object"}}, "regex": "a"},
        "text.format and regex cannot be combined",
    ),
    ({"input": "x", "reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"input": "x", "reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"input": "x", "truncation": "auto"}, "truncation"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens must be at least 1"),
    ({"input": "x", "max_output_tokens": 10**9}, "maximum context length"),
    ({"input": "x", "temperature": -1}, "temperature"),
    ({"input": "x", "top_p": "a"}, "top_p must be a number"),
    ({"input": "x", "metadata": {"a": {}}}, "metadata"),
    ({"input": "x", "include": ["message.output_text.logprobs"]}, "include[0] must be one of"),
    ({"input": "x", "top_logprobs": 2}, "top_logprobs is not supported"),
    ({"input": "x", "background": True, "store": False}, "background needs store"),
    ({"input": "x", "conversation": "conv_1"}, "conversation is not supported"),
    ({"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt is not supported"),
    ({"input": "x", "max_tokens": 5}, "max_tokens is not supported"),
    ({"input": "x", "n": 2}, "n is not supported"),
    ({"input": "x", "previous_response_id": 5}, "previous_response_id must be a string"),
    (
        {"input": "x", "previous_response_id": "bad"},
        "Invalid 'previous_response_id': 'bad'. The id of a response begins with 'resp_'.",
    ),
    ({"input": "x", "model": "a:b"}, "model 'a:b' names a LoRA adapter"),
]


def test_bodies_are_refused_by_name(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for body, message in REFUSED:
            answer = await server.http.post("/v1/responses", json=body)
            assert (answer.status_code, answer.json()["code"]) == (400, 400), body
            assert message in answer.json()["error"]["message"]
        assert not server.engine.submitted

    serve(scenario, says("x"))


def test_a_model_of_null_is_the_served_one(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        bodies = {
            "/v1/responses": {"input": "x"},
            "/v1/responses/input_tokens": {"input": "x"},
            "/v1/completions": {"prompt": "x"},
            "/v1/chat/completions": {"messages": [USER]},
        }
        for route, body in bodies.items():
            answer = await server.http.post(route, json=body | {"model": None})
            assert answer.status_code == 200, (route, answer.text)
            assert answer.json().get("model", "org/tiny") == "org/tiny"
            assert "warnings" not in answer.text

    serve(scenario, says("x"))


LISTS = {
    "limit=0": "limit must be from 1 to 100",
    "order=x": "order must be",
    "after=x": "after: this list has no entry",
}


def test_lists_of_items_that_cannot_be_made(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        own_id = (await server.http.post("/v1/responses", json={"input": "x"})).json()["id"]
        for query, message in LISTS.items():
            answer = await server.http.get(f"/v1/responses/{own_id}/input_items?{query}")
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]
        answer = await server.http.get(f"/v1/responses/{own_id}?stream=true")
        assert answer.status_code == 400
        assert "stream" in answer.json()["error"]["message"]

    serve(scenario, says("x"))


JSON: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "name", "call_id", "output", "arguments", "id"]
            ),
            inner
            | st.sampled_from(["user", "assistant", "message", "function_call", "input_text"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)
OPTIONAL = (
    *("instructions", "tools", "tool_choice", "text", "reasoning", "include", "metadata"),
    *("previous_response_id", "max_output_tokens", "store", "background", "truncation"),
)
TEXTS: Any = st.sampled_from(["f", "c", "{}", ""]) | JSON
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            [
                "message",
                "function_call",
                "function_call_output",
                "custom_tool_call",
                "local_shell_call_output",
                "shell_call",
                "apply_patch_call_output",
                "reasoning",
            ]
        )
        | JSON,
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": TEXTS | st.lists(st.just({"type": "input_text", "text": "x"}) | JSON),
        **dict.fromkeys(("call_id", "name", "arguments", "output", "summary", "id"), TEXTS),
    },
)
BODIES = st.fixed_dictionaries(
    {"input": st.lists(st.just(USER) | ITEMS) | JSON}, optional=dict.fromkeys(OPTIONAL, JSON)
)


@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it keeps nothing
)
@given(bodies=st.lists(BODIES, min_size=20, max_size=20))
def test_no_body_is_a_bug(serve: Serve, bodies: list[dict[str, Any]]) -> None:
    async def scenario(server: Any) -> None:
        for body in bodies:
            answer = await server.http.post("/v1/responses", json=body)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            if answer.status_code == 200:
                await server.http.delete(f"/v1/responses/{answer.json()['id']}")

    serve(scenario, says("x"))
