"""Anthropic's messages as the neutral chat has them."""

from __future__ import annotations

from typing import Any

import pytest

from setpoint.core.errors import RequestError
from setpoint.frontend.apis.anthropic.history import history_of

CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sky"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
CALLED = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "look", "arguments": {"at": "sky"}},
}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def thought(content: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": content, "signature": ""}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("system", "messages", "history"),
    [
        (None, [user("hi")], [user("hi")]),
        ("Be brief.", [user("hi")], [{"role": "system", "content": "Be brief."}, user("hi")]),
        (
            [text("One.", cache_control={"type": "ephemeral"}), text("Two.")],
            [user([text("a"), text("b", cache_control={"type": "ephemeral", "ttl": "1h"})])],
            [{"role": "system", "content": "One.\nTwo."}, user("a\nb")],
        ),
        ("", [user("a"), user("b")], [user("a\nb")]),
        (
            None,
            [user("a"), assistant("b"), assistant([text("c")]), user("d")],
            [user("a"), assistant("b\nc"), user("d")],
        ),
        (
            None,
            [
                user("a"),
                assistant([thought("One."), text("b")]),
                assistant("c"),
                assistant([thought("Two."), CALL]),
                user([RESULT]),
            ],
            [
                user("a"),
                assistant("b\nc") | {"reasoning_content": "One.\nTwo.", "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "toolu_1", "content": ""},
            ],
        ),
        (
            None,
            [
                user("Rain?"),
                assistant(
                    [
                        {"type": "thinking", "thinking": "I look.", "signature": "x"},
                        {"type": "redacted_thinking", "data": "abc"},
                        text("Let me see."),
                        CALL,
                    ]
                ),
                user([{**RESULT, "content": [text("no"), text("clouds")]}, text("And now?")]),
            ],
            [
                user("Rain?"),
                {
                    **assistant("Let me see."),
                    "reasoning_content": "I look.",
                    "tool_calls": [CALLED],
                },
                {"role": "tool", "tool_call_id": "toolu_1", "content": "no\nclouds"},
                user("And now?"),
            ],
        ),
        (
            None,
            [user("a"), {"role": "system", "content": "Be kind."}],
            [user("a"), {"role": "system", "content": "Be kind."}],
        ),
    ],
)
def test_messages_become_a_history(system: Any, messages: Any, history: Any) -> None:
    assert history_of(system, messages, []) == history


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({}, ""),
        ({"content": ""}, ""),
        ({"content": []}, ""),
        ({"content": "3"}, "3"),
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
    ],
)
def test_a_tool_result_is_text(result: dict[str, Any], content: str) -> None:
    *_, tool = history_of(None, [user("a"), assistant([CALL]), user([{**RESULT, **result}])], [])
    assert tool == {"role": "tool", "tool_call_id": "toolu_1", "content": content}


def test_the_line_that_differs_in_every_request_of_claude_code_is_left_out() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=eb6c6;"
    system = {"role": "system", "content": "You help."}
    assert history_of([text(line), text("You help.")], [user("a")], [])[0] == system
    assert history_of(f"{line}\nYou help.", [user("a")], [])[0] == system
    assert history_of(None, [user(line)], []) == [user(line)]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must not be empty."),
        ([{"content": "a"}], "messages[0].role must be user, assistant or system; got null."),
        (
            [{"role": "tool", "content": "a"}],
            "messages[0].role must be user, assistant or system; got 'tool'.",
        ),
        ([{"role": "user"}], "messages[0].content must be a string or a list of blocks, got null."),
        ([user(5)], "messages[0].content must be a string or a list of blocks"),
        ([user([])], "messages[0].content must not be empty."),
        ([user(["a"])], "messages[0].content[0] must be an object with a type, got a string."),
        ([user([{"text": "a"}])], "messages[0].content[0].type must be text or tool_result"),
        ([user([{"type": "text"}])], "messages[0].content[0].text is missing."),
        (
            [user([{"type": "text", "text": 1}])],
            "messages[0].content[0].text must be a string, got a whole number.",
        ),
        (
            [user([text("a"), {"type": "image", "source": {}}])],
            (
                "messages[0].content[1].type must be text or tool_result, got 'image': this model"
                " reads text only."
            ),
        ),
        ([user([{"type": "document"}])], "got 'document'"),
        ([user([CALL])], "messages[0].content[0].type must be text or tool_result, got 'tool_use'"),
        (
            [user("a"), assistant([{**CALL, "input": "x"}])],
            "messages[1].content[0].input must be an object, got a string.",
        ),
        (
            [user([{**RESULT, "content": "a"}])],
            (
                "messages[0].content[0].tool_use_id is 'toolu_1', but no earlier tool_use"
                " block has that id."
            ),
        ),
        (
            [user("a"), assistant([CALL]), user([{"type": "tool_result"}])],
            "messages[2].content[0].tool_use_id is missing.",
        ),
        (
            [user("a"), assistant([CALL]), user([{"type": "tool_result", "id": "x"}])],
            "messages[2].content[0].id is 'x', but no earlier tool_use block has that id.",
        ),
        (
            [user("a"), assistant([CALL])],
            "messages[1] calls tools, so a user message with their results must follow it.",
        ),
    ],
)
def test_a_wrong_block_is_named(messages: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        history_of(None, messages, [])
    assert caught.value.message.startswith(message) or message in caught.value.message


@pytest.mark.parametrize(
    ("system", "message"),
    [
        ([{"type": "image"}], "system[0].type must be text, got 'image'"),
        ([5], "system[0] must be an object with a type, got a whole number."),
    ],
)
def test_a_wrong_system_prompt_is_named(system: Any, message: str) -> None:
    with pytest.raises(RequestError, match="system") as caught:
        history_of(system, [user("a")], [])
    assert caught.value.message.startswith(message)


def test_many_messages_of_one_turn_are_joined_once() -> None:
    """20,000 messages would be 20,000 copies of the text if it grew by each."""
    history = history_of(None, [user(f"{number:0200}") for number in range(20_000)], [])
    (turn,) = history
    assert turn["content"].split("\n") == [f"{number:0200}" for number in range(20_000)]


@pytest.mark.parametrize("more", [{}, {"tool_use_id": None}])
def test_the_call_of_a_result_may_be_named_by_id(more: dict[str, Any]) -> None:
    result = {"type": "tool_result", "id": "toolu_1", "content": "blue", **more}
    history = history_of(None, [user("a"), assistant([CALL]), user([result])], [])
    assert history[-1] == {"role": "tool", "tool_call_id": "toolu_1", "content": "blue"}
