"""Tools and thinking on Anthropic's routes, with a fake engine (docs/anthropic.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from answers import HI, says
from anthropic_messages import BODY, MESSAGES, create, events_of

Serve = Callable[..., None]
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
CALLS = (
    "I shall look.</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "the süd 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
)


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a client makes of a stream."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(blocks)
                blocks.append({**block, "json": ""})
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == len(blocks) - 1
                for key, name in (
                    *(("text", "text"), ("thinking", "thinking"), ("partial_json", "json")),
                    ("signature", "signature"),
                ):
                    if key in delta:
                        blocks[-1][name] += delta[key]
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    return blocks


def test_thinking_text_and_calls_are_blocks_whole_and_streamed(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {"tools": [LOOK], "thinking": {"type": "adaptive"}}
        whole = await create(server, **body, max_tokens=1000)
        assert [block["type"] for block in whole["content"]] == [
            *("thinking", "text", "tool_use", "tool_use"),
        ]
        thinking, text, first, second = whole["content"]
        assert thinking["thinking"].strip() == "I shall look."
        assert thinking["signature"]
        assert text["text"].strip() == "Let me see."
        assert (first["name"], first["input"]) == ("look", {"at": "the süd 🙂"})
        assert (second["name"], second["input"]) == ("look", {})
        assert first["id"] != second["id"]
        assert whole["stop_reason"] == "tool_use"
        assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0
        stream = await server.http.post(
            MESSAGES, json=BODY | body | {"stream": True, "max_tokens": 1000}
        )
        events = events_of(stream.text)
        ids = ("id",)  # drawn anew
        assert [
            {key: value for key, value in block.items() if key not in ids}
            for block in put_together(events)
        ] == [
            {key: value for key, value in block.items() if key not in ids}
            for block in whole["content"]
        ]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        assert events[-2]["usage"].items() <= whole["usage"].items()

    serve(scenario, says(CALLS, context_len=4096), reasoning_parser="deepseek-r1")


def test_an_answer_with_calls_can_be_sent_back(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await create(server, tools=[LOOK], max_tokens=1000)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "blue"}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        messages = [
            *HI,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]},
        ]
        await create(server, tools=[LOOK], messages=messages, max_tokens=1000)
        ids = server.engine.submitted[-1].prompt().tolist()
        prompt = bytes(token for token in ids if token < 256).decode()
        assert prompt.count("blue") == 2
        assert '"at":"the süd 🙂"' in prompt.replace('": "', '":"')

    serve(scenario, says(CALLS, context_len=4096), reasoning_parser="deepseek-r1")


def test_a_call_that_the_limit_cuts_off(serve: Serve) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "the so'

    async def scenario(server: Any) -> None:
        answer = await create(server, tools=[LOOK], max_tokens=len(call))
        assert answer["stop_reason"] == "max_tokens"
        assert [block.get("input", {}) for block in answer["content"]] == [{}]

    serve(scenario, says(call + 'uth"}}', context_len=4096))


@pytest.mark.parametrize(
    ("choice", "mode"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
    ],
)
def test_a_choice_decides_whether_the_model_is_told_of_tools(
    serve: Serve, choice: dict[str, Any], mode: str
) -> None:
    async def scenario(server: Any) -> None:
        await create(server, tools=[LOOK], tool_choice=choice)
        ids = server.engine.submitted[0].prompt().tolist()
        prompt = bytes(token for token in ids if token < 256).decode()
        assert ("Looks." in prompt) == (mode == "auto")

    serve(scenario, says("Hi", context_len=4096))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"output_config": {"format": {"type": "json_schema", "schema": {"a": 1}}}}, '{"a":1}'),
        ({"output_format": {"type": "json_schema", "schema": {"a": 1}}}, '{"a":1}'),
        ({"output_config": {"effort": "low"}}, None),
    ],
)
def test_a_format_constrains_the_answer(
    serve: Serve, body: dict[str, Any], expected: str | None
) -> None:
    async def scenario(server: Any) -> None:
        await create(server, **body)
        assert server.engine.submitted[0].sampling.json_schema == expected

    serve(scenario, says("{}"))


@pytest.mark.parametrize(
    ("choice", "pattern"),
    [
        ({"type": "any"}, "look"),
        ({"type": "tool", "name": "look"}, "look"),
        ({"type": "any", "disable_parallel_tool_use": True}, "look"),
    ],
)
def test_a_call_that_must_be_made_is_constrained(
    serve: Serve, choice: dict[str, Any], pattern: str
) -> None:
    async def scenario(server: Any) -> None:
        await create(server, tools=[LOOK], tool_choice=choice)
        constraint = server.engine.submitted[0].sampling.constraint
        assert constraint is not None
        assert pattern in constraint.text

    serve(scenario, says("Hi", context_len=4096))
