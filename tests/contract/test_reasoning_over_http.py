"""Reasoning over HTTP: where it ends, and what comes after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from answers import CHAT, HI, says

Serve = Callable[..., None]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ message.content }}\n{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
JSON_CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=look>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


async def said(server: Any, **body: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Text, reasoning, calls and finish reason of an answer, which are the same in a stream."""
    body = {"model": "m", "messages": HI, **body}
    create = server.openai.chat.completions.create
    choice = (await create(**body)).choices[0]
    message = choice.message
    async with server.openai.chat.completions.stream(**body) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    found = [
        (
            each.message.content or "",
            each.message.reasoning_content or "",
            [
                (call.function.name, call.function.arguments)
                for call in each.message.tool_calls or []
            ],
            each.finish_reason,
        )
        for each in (choice, streamed)
    ]
    assert found[0] == found[1], message
    return found[0]


@pytest.mark.parametrize(
    ("reasoning", "tools", "call"),
    [
        ("qwen3", "hermes", JSON_CALL),
        ("qwen3", "qwen3_coder", XML_CALL),
        ("nemotron_3", "qwen3_coder", XML_CALL),
        ("granite_thinking_parser", "qwen3_coder", XML_CALL),
        ("mimo", "mimo", XML_CALL),
        ("interns1", "hermes", JSON_CALL),
        ("qwen3-thinking", "hermes", JSON_CALL),
        ("deepseek-v3", "hermes", JSON_CALL),
        (
            "minimax",
            "minimax-m2",
            '<minimax:tool_call>\n<invoke name="look">\n<parameter name="a">1</parameter>\n'
            "</invoke>\n</minimax:tool_call>",
        ),
    ],
)
def test_a_call_ends_reasoning_that_was_left_open(
    serve: Serve, reasoning: str, tools: str, call: str
) -> None:
    """Red before: the call was reasoning, and the answer was empty."""

    async def scenario(server: Any) -> None:
        text, thought, calls, finish = await said(server, tools=TOOLS)
        assert (text, thought, finish) == ("", "I need to read.", "tool_calls")
        assert [name for name, _ in calls] == ["look"]
        # The route that has only text follows the same rule.
        body = {"text": f"<think>I need to read.\n\n{call}", "reasoning_parser": reasoning}
        response = await server.http.post("/separate_reasoning", json=body)
        assert response.json() == {"reasoning_text": "I need to read.", "text": call}

    serve(
        scenario,
        says(f"<think>I need to read.\n\n{call}", context_len=4096),
        chat_template=TEMPLATE,
        reasoning_parser=reasoning,
        tool_call_parser=tools,
    )


def test_a_call_that_the_reasoning_quotes_is_not_made(serve: Serve) -> None:
    thought = f"I could write `{JSON_CALL}`, or <tool_call> in another way."

    async def scenario(server: Any) -> None:
        assert await said(server, tools=TOOLS) == ("No.", thought, [], "stop")

    serve(
        scenario,
        says(f"<think>{thought}</think>No.", context_len=4096),
        chat_template=TEMPLATE,
        reasoning_parser="qwen3",
        tool_call_parser="hermes",
    )


@pytest.mark.parametrize(
    ("reasoning", "answer", "expected"),
    [
        ("granite_thinking_parser", "<think>Hm.</think>Yes.", ("Yes.", "Hm.")),
        (
            "granite",
            "Here is my thought process: Hm. Here is my response: Yes.",
            ("Yes.", "Hm."),
        ),
        ("minimax-m3", "</mm:think>Yes.", ("Yes.", "")),
        ("minimax-m3", "<mm:think>Hm.</mm:think>Yes.", ("Yes.", "Hm.")),
        ("qwen3", "</think>\n\nYes.", ("Yes.", "")),
        ("qwen3", "<think><think>Hm.</think>Yes.", ("Yes.", "Hm.")),
    ],
)
def test_markers_at_the_start(
    serve: Serve, reasoning: str, answer: str, expected: tuple[str, str]
) -> None:
    async def scenario(server: Any) -> None:
        assert (await said(server))[:2] == expected
        body = {"text": answer, "reasoning_parser": reasoning}
        response = await server.http.post("/separate_reasoning", json=body)
        assert response.json() == {"reasoning_text": expected[1], "text": expected[0]}

    serve(
        scenario,
        says(answer, context_len=4096),
        chat_template=TEMPLATE,
        reasoning_parser=reasoning,
        tool_call_parser="hermes",
    )


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek-v3", "glm45", "granite_thinking_parser"])
def test_a_schema_forces_no_reasoning_that_is_off(serve: Serve, reasoning: str) -> None:
    """Red before: a variable that nobody had set was taken for on."""
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    switch = "{% if enable_thinking is defined and enable_thinking or thinking %}<think>{% endif %}"

    async def scenario(server: Any) -> None:
        assert await said(server, response_format=schema) == ('{"a": 1}', "", [], "stop")
        asked = {"enable_thinking": True, "thinking": True}
        body = {"model": "m", "messages": HI, "chat_template_kwargs": asked}
        response = await server.http.post(CHAT, json={**body, "response_format": schema})
        assert "can write '</think>' in different tokens" in response.text

    serve(
        scenario,
        says('{"a": 1}', context_len=4096),
        chat_template=TEMPLATE + switch,
        reasoning_parser=reasoning,
    )
