"""Answers that end inside a call: by a stop string, by a limit, or by the model itself. No API says
that such a call is finished, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from answers import CHAT, HI, says
from anthropic_messages import MESSAGES, create, events_of
from ollama_answers import CHAT as OLLAMA_CHAT
from ollama_answers import lines, post

Serve = Callable[..., None]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ message.content }}\n{% endfor %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
BEGUN = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"city": "',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=city>\n",
    "gpt-oss": '<|channel|>commentary to=functions.look<|message|>{"city": "',
}
WHOLE = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>\n',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=city>\nRome\n</parameter>\n"
    "</function>\n</tool_call>\n",
    "gpt-oss": '<|channel|>commentary to=functions.look<|message|>{"city": "Rome"}<|call|>'
    "<|start|>assistant",
}
ROME = '{"city": "Rome"}'
ENDS = ("the model", "a stop string", "a limit")
CASES = [
    pytest.param(name, end, before, id=f"{name}, {end}, {before} before")
    for name in BEGUN
    for end in ENDS
    for before in (0, 1)
]


def engine_of(name: str, end: str, before: int) -> tuple[Any, dict[str, Any]]:
    """An engine that begins a call after ``before`` whole ones, and the fields of a request (in
    OpenAI's names) that end it there."""
    begun = WHOLE[name] * before + BEGUN[name]
    if end == "the model":
        return says(begun, context_len=4096), {}
    engine = says(begun + "Oslo is a city", context_len=4096)
    return engine, {"stop": ["Oslo"]} if end == "a stop string" else {
        "max_tokens": len(begun.encode())
    }


def run(serve: Serve, scenario: Any, engine: Any, name: str) -> None:
    serve(scenario, engine, chat_template=TEMPLATE, tool_call_parser=name)


@pytest.mark.cases(7)
@pytest.mark.parametrize(("name", "end", "before"), CASES)
def test_openai(serve: Serve, name: str, end: str, before: int) -> None:
    engine, ends = engine_of(name, end, before)
    expected = "length" if end == "a limit" else "tool_calls" if before else "stop"

    async def scenario(server: Any) -> None:
        body = {"model": "m", "messages": HI, "tools": TOOLS, **ends}
        choice = (await server.http.post(CHAT, json=body)).json()["choices"][0]
        assert choice["finish_reason"] == expected
        assert choice["matched_stop"] == (
            "Oslo" if end == "a stop string" else choice["matched_stop"]
        )
        calls = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        assert calls[:-1] == [ROME] * before
        with pytest.raises(json.JSONDecodeError):
            json.loads(calls[-1])
        response = await server.http.post(CHAT, json={**body, "stream": True})
        chunks = [
            json.loads(line.removeprefix("data: "))
            for line in response.text.split("\n")
            if line and "[DONE]" not in line
        ]
        streamed = [""] * (before + 1)
        for chunk in chunks:
            for call in chunk["choices"][0]["delta"].get("tool_calls", []):
                assert call.get("id") or call["function"]["arguments"], "an empty delta"
                streamed[call["index"]] += call["function"]["arguments"]
        assert streamed == calls
        assert chunks[-1]["choices"][0]["finish_reason"] == expected

    run(serve, scenario, engine, name)


@pytest.mark.cases(7)
@pytest.mark.parametrize(("name", "end", "before"), CASES)
def test_responses(serve: Serve, name: str, end: str, before: int) -> None:
    engine, ends = engine_of(name, end, before)
    if "max_tokens" in ends:
        ends = {"max_output_tokens": ends["max_tokens"]}
    reason = "max_output_tokens" if end == "a limit" else "incomplete_call"

    async def scenario(server: Any) -> None:
        body = {"model": "m", "input": "hi", "tools": [{"type": "function", **FUNCTION}], **ends}
        whole = (await server.http.post("/v1/responses", json=body)).json()
        streamed = await server.http.post("/v1/responses", json={**body, "stream": True})
        last = json.loads(streamed.text.rstrip().rpartition("data: ")[2])
        assert last["type"] == "response.incomplete"
        for response in (whole, last["response"]):
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": reason}
            assert response["completed_at"] is None
            assert [(item["type"], item["status"]) for item in response["output"]] == [
                *[("function_call", "completed")] * before,
                ("function_call", "incomplete"),
            ]

    run(serve, scenario, engine, name)


@pytest.mark.cases(7)
@pytest.mark.parametrize(("name", "end", "before"), CASES)
def test_anthropic(serve: Serve, name: str, end: str, before: int) -> None:
    engine, ends = engine_of(name, end, before)
    own = "tool_use" if before else "end_turn"
    expected = {"the model": own, "a stop string": "stop_sequence", "a limit": "max_tokens"}[end]
    tools = [{"name": "look", "input_schema": SCHEMA}]

    async def scenario(server: Any) -> None:
        body = {"tools": tools, "max_tokens": ends.get("max_tokens", 1000)}
        if "stop" in ends:
            body["stop_sequences"] = ends["stop"]
        whole = await create(server, **body)
        assert whole["stop_reason"] == expected
        assert [block["input"] for block in whole["content"]] == [{"city": "Rome"}] * before + [{}]
        sent = {"model": "m", "messages": HI, "stream": True, **body}
        events = events_of((await server.http.post(MESSAGES, json=sent)).text)
        assert events[-2]["delta"]["stop_reason"] == expected

    run(serve, scenario, engine, name)


@pytest.mark.cases(7)
@pytest.mark.parametrize(("name", "end", "before"), CASES)
def test_ollama(serve: Serve, name: str, end: str, before: int) -> None:
    """Its calls are whole objects, so a half one is left out, and the client is told."""
    engine, ends = engine_of(name, end, before)
    if "max_tokens" in ends:
        ends = {"num_predict": ends["max_tokens"]}

    async def scenario(server: Any) -> None:
        body = {"model": "org/tiny", "messages": HI, "tools": TOOLS, "options": ends}
        one = await post(server, OLLAMA_CHAT, {**body, "stream": False})
        *objects, last = await lines(server, OLLAMA_CHAT, {**body, "stream": True})
        streamed = [call for each in objects for call in each["message"].get("tool_calls", [])]
        for answer, calls in ((one, one["message"].get("tool_calls", [])), (last, streamed)):
            assert answer["done_reason"] == ("length" if end == "a limit" else "stop")
            assert [call["function"]["arguments"] for call in calls] == [{"city": "Rome"}] * before
            assert answer["warnings"] == [
                "The answer ended inside a call of 'look', which is left out."
            ]

    run(serve, scenario, engine, name)


@pytest.mark.parametrize("end", ENDS)
def test_a_call_whose_arguments_are_complete_is_whole(serve: Serve, end: str) -> None:
    """Only the marker behind it is missing."""
    text = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}'
    engine = says(text if end == "the model" else f"{text}</tool_call>", context_len=4096)
    ends: dict[str, Any] = {"a stop string": {"stop": ["</tool_call>"]}, "the model": {}}.get(
        end, {"max_tokens": len(text)}
    )

    async def scenario(server: Any) -> None:
        body = {"model": "m", "messages": HI, "tools": TOOLS, **ends}
        choice = (await server.http.post(CHAT, json=body)).json()["choices"][0]
        assert choice["finish_reason"] == ("length" if end == "a limit" else "tool_calls")
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ROME

    run(serve, scenario, engine, "hermes")
