"""A history that another provider's tools have left parts in is read without these parts, and the
client is told: it sends the history again with every turn, so that a refusal would end the session
for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from answers import says

Serve = Callable[..., None]
ASK = {"role": "user", "content": "And now?"}
CALLED = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}],
}


def result(*blocks: Any) -> list[Any]:
    """Anthropic's messages around a tool's result with these blocks."""
    answer = {"type": "tool_result", "tool_use_id": "t1", "content": list(blocks)}
    return [ASK, CALLED, {"role": "user", "content": [answer]}]


def openai_result(*parts: Any) -> list[Any]:
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [ASK, called, {"role": "tool", "tool_call_id": "t1", "content": list(parts)}]


def output(*parts: Any) -> list[Any]:
    """Items of Responses around an output with these parts."""
    call = {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"}
    return [ASK, call, {"type": "function_call_output", "call_id": "t1", "output": list(parts)}]


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
LEFT_OUT = "is left out: this model reads only text."
SERVER_TOOL = [
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
    {"type": "text", "text": "Found."},
]

CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a tool reference": (
        "/v1/messages",
        {"messages": result({"type": "tool_reference", "tool_name": "read"})},
        "",
        "Found the tool 'read'.",
    ),
    "Anthropic's picture": (
        "/v1/messages",
        {"messages": result({"type": "text", "text": "See."}, PICTURE)},
        "image (1)",
        f"'image' {LEFT_OUT}",
    ),
    "Anthropic's document": (
        "/v1/messages",
        {"messages": result({"type": "document", "source": {}})},
        "document (1)",
        LEFT_OUT,
    ),
    "Anthropic's own tools": (
        "/v1/messages",
        {"messages": [ASK, {"role": "assistant", "content": SERVER_TOOL}, ASK]},
        "server_tool_use (1), web_search_tool_result (1)",
        "Found.",
    ),
    "nothing but Anthropic's own tools": (
        "/v1/messages",
        {"messages": [ASK, {"role": "assistant", "content": SERVER_TOOL[:1]}, ASK]},
        "server_tool_use (1)",
        "And now?",
    ),
    "Anthropic's compaction": (
        "/v1/messages",
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "compaction", "content": "So far."}]},
                ASK,
            ]
        },
        "",
        "So far.",
    ),
    "OpenAI's picture": (
        "/v1/chat/completions",
        {"messages": openai_result({"type": "image_url", "image_url": {"url": "data:"}})},
        "image_url (1)",
        f"'image_url' {LEFT_OUT}",
    ),
    "a picture in an output": (
        "/v1/responses",
        {"input": output({"type": "input_image", "image_url": "data:"})},
        "input_image (1)",
        f"'input_image' {LEFT_OUT}",
    ),
    "Ollama's picture": (
        "/api/chat",
        {
            "messages": [
                ASK,
                {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]},
                {"role": "tool", "content": "See.", "images": ["aGk="]},
            ]
        },
        "image (1)",
        f"'image' {LEFT_OUT}",
    ),
}
for kind in (
    *("web_search_call", "mcp_call", "mcp_list_tools", "mcp_approval_request", "compaction"),
    *("image_generation_call", "code_interpreter_call", "file_search_call", "computer_call"),
    *("computer_call_output", "tool_search_call", "tool_search_output", "of_next_year"),
):
    item = {"type": kind, "id": "x1", "status": "completed"}
    body = {"input": [ASK, item, {"role": "assistant", "content": "Yes."}, ASK]}
    CASES[kind] = ("/v1/responses", body, f"{kind} (1)", "Yes.")


@pytest.mark.parametrize("case", CASES)
def test_the_session_goes_on(serve: Serve, case: str) -> None:
    """Red before: every one of these was a 400."""
    route, body, warned, read = CASES[case]

    async def scenario(server: Any) -> None:
        before = server.service.events.book.warned_bodies
        sent = {"model": "default", "max_tokens": 9, "stream": False, **body}
        if not route.startswith("/v1/m"):
            del sent["max_tokens"]
        answer = await server.http.post(route, json=sent)
        assert answer.status_code == 200, answer.text
        prompt = bytes(server.engine.submitted[-1].prompt()[:].astype("uint8")).decode("latin-1")
        assert read in prompt
        warnings = " ".join(answer.json().get("warnings", ()))
        assert warned in warnings
        assert bool(warned) == bool(server.service.events.book.warned_bodies - before)

    serve(scenario, says("ok"))


def test_a_picture_that_the_user_asks_about_is_still_refused(serve: Serve) -> None:
    """An answer about it could only be invented."""

    async def scenario(server: Any) -> None:
        body = {"model": "default", "max_tokens": 9}
        asked = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What is it?"}]}]
        answer = await server.http.post("/v1/messages", json={**body, "messages": asked})
        assert (answer.status_code, answer.json()["error"]["type"]) == (
            400,
            "invalid_request_error",
        )

    serve(scenario, says("ok"))


def test_a_stored_history_keeps_the_items(serve: Serve) -> None:
    """They are listed, and passed over again when the conversation goes on."""

    async def scenario(server: Any) -> None:
        item = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
        first = await server.http.post("/v1/responses", json={"input": [ASK, item]})
        assert first.status_code == 200, first.text
        own_id = first.json()["id"]
        listed = (await server.http.get(f"/v1/responses/{own_id}/input_items")).json()["data"]
        assert item in listed
        body = {"input": "Go on.", "previous_response_id": own_id}
        second = await server.http.post("/v1/responses", json=body)
        assert second.status_code == 200
        assert "web_search_call (1)" in " ".join(second.json()["warnings"])

    serve(scenario, says("ok"))
