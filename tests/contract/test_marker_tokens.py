"""Markers that are tokens of the model: what other tokens write is text, in every API."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from answers import CHAT, HI
from anthropic_messages import create
from ollama_answers import CHAT as OLLAMA_CHAT
from ollama_answers import post

from setpoint_testing.byte_tokenizer import EOS_ID, VOCAB_SIZE
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ message.content }}\n{% endfor %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "look", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def ids_of(*parts: str | int) -> list[int]:
    """The ids of texts, written as bytes, and of markers, given by their index."""
    ids: list[int] = []
    for part in parts:
        ids += [VOCAB_SIZE + part] if isinstance(part, int) else part.encode()
    return [*ids, EOS_ID]


def answer(*parts: str | int, **options: Any) -> FakeEngine:
    ids = ids_of(*parts)
    return FakeEngine(
        script=lambda request: ids, eos_ids=frozenset({EOS_ID}), context_len=4096, **options
    )


def run(
    serve: Serve, scenario: Any, engine: Any, *, tokens: Sequence[str] = MARKERS, **options: Any
) -> None:
    serve(
        scenario,
        engine,
        **{
            "chat_template": TEMPLATE,
            "reasoning_parser": "qwen3",
            "tool_call_parser": "hermes",
            "tokens": tokens,
            **options,
        },
    )


JSON = '{"name": "look", "arguments": {"city": "</tool_call> </think>"}}'
THOUGHT = "split at </think>, and <tool_call>"
PARTS = (0, THOUGHT, 1, "So <think>, <tool_call>", JSON, 2, JSON, 3)
TEXT = f"So <think>, <tool_call>{JSON}"
ARGUMENTS = {"city": "</tool_call> </think>"}


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
@pytest.mark.parametrize(
    "fields", [{}, {"stop": ["ink>!", "So <t!"]}, {"skip_special_tokens": False}]
)
def test_openai(serve: Serve, fields: dict[str, Any], tokens_per_event: int) -> None:
    """Red before: the reasoning ended at the text, and the text began a call."""

    async def scenario(server: Any) -> None:
        body = {"model": "m", "messages": HI, "tools": TOOLS, **fields}
        response = await server.http.post(CHAT, json=body)
        message = response.json()["choices"][0]["message"]
        async with server.openai.chat.completions.stream(
            model="m", messages=HI, tools=TOOLS, extra_body=fields
        ) as stream:
            streamed = (await stream.get_final_completion()).choices[0].message
        assert message["reasoning_content"] == streamed.reasoning_content == THOUGHT
        assert message["content"] == streamed.content == TEXT
        (call,), (other,) = message["tool_calls"], streamed.tool_calls
        assert call["function"]["arguments"] == other.function.arguments
        assert json.loads(other.function.arguments) == ARGUMENTS

    run(serve, scenario, answer(*PARTS, tokens_per_event=tokens_per_event))


def test_the_other_apis(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        tools = [{"name": "look", "input_schema": SCHEMA}]
        thinking, text, call = (await create(server, tools=tools, max_tokens=1000))["content"]
        assert (thinking["thinking"], text["text"], call["input"]) == (THOUGHT, TEXT, ARGUMENTS)
        body = {"model": "org/tiny", "messages": HI, "tools": TOOLS, "stream": False}
        message = (await post(server, OLLAMA_CHAT, body))["message"]
        assert (message["thinking"], message["content"]) == (THOUGHT, TEXT)
        assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
        asked = {"model": "m", "input": "hi", "tools": [{"type": "function", **FUNCTION}]}
        response = (await server.http.post("/v1/responses", json=asked)).json()
        reasoning, message, call = response["output"]
        assert reasoning["content"][0]["text"] == THOUGHT
        assert message["content"][0]["text"] == TEXT
        assert json.loads(call["arguments"]) == ARGUMENTS

    run(serve, scenario, answer(*PARTS))


def test_a_marker_that_is_text_at_the_start_opens_no_reasoning(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(CHAT, json={"model": "m", "messages": HI})
        message = response.json()["choices"][0]["message"]
        assert message["reasoning_content"] is None
        assert message["content"] == "<think> is a tag, </think> another."

    run(serve, scenario, answer("<think> is a tag, </think> another."))


def test_a_tokenizer_without_the_markers_keeps_the_rules_of_text(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(CHAT, json={"model": "m", "messages": HI})
        message = response.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        # The routes that have only text keep them, too.
        body = {"text": "<think>Hm.</think>Yes.", "reasoning_parser": "qwen3"}
        parsed = await server.http.post("/separate_reasoning", json=body)
        assert parsed.json() == {"reasoning_text": "Hm.", "text": "Yes."}

    run(serve, scenario, answer("<think>Hm.</think>Yes."), tokens=())


def test_calls_that_a_constraint_writes_may_be_text(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {"model": "m", "messages": HI, "tools": TOOLS, "tool_choice": "required"}
        choice = (await server.http.post(CHAT, json=body)).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "look"

    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    run(serve, scenario, answer(call), reasoning_parser="none")


def test_elements_whose_tags_are_tokens(serve: Serve) -> None:
    """A value may hold its own closing tag."""
    tags = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    parts = (0, "look", 2, "city", 3, 4, "a </arg_value> b </tool_call>", 5, 1)

    async def scenario(server: Any) -> None:
        body = {"model": "m", "messages": HI, "tools": TOOLS}
        message = (await server.http.post(CHAT, json=body)).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {
            "city": "a </arg_value> b </tool_call>"
        }
        assert not message["content"]

    run(
        serve, scenario, answer(*parts), tokens=tags,
        tool_call_parser="glm45", reasoning_parser="none",
    )  # fmt: skip
