"""Anthropic's routes over HTTP, with a fake engine (docs/anthropic.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from answers import HI, says
from anthropic_messages import BODY, MESSAGES, create, events_of

from setpoint.core.messages import Finish
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
COUNT = "/v1/messages/count_tokens"
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_message_comes_whole(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.post(MESSAGES, params={"beta": "true"}, json=BODY)
        message = answer.json()
        num_prompt = len(server.service.answering.text.tokenizer.encode(PROMPT))
        assert message == {
            "id": server.engine.submitted[0].rid,
            "type": "message",
            "role": "assistant",
            "model": "org/tiny",
            "content": [{"type": "text", "text": "Hello, Ümit 🙂"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": num_prompt - 2,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 2,
                "output_tokens": len("Hello, Ümit 🙂".encode()) + 1,
                "output_tokens_details": {"thinking_tokens": 0},
                "service_tier": "standard",
            },
        }
        assert answer.headers["request-id"] == message["id"]
        assert message["id"].startswith("msg_")

    serve(scenario, says("Hello, Ümit 🙂", num_cached=2))


def test_a_stream_has_every_event_in_order(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        whole = await create(server)
        response = await server.http.post(MESSAGES, json=BODY | {"stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response.text)
        assert [event["type"] for event in events] == [
            *("message_start", "ping", "content_block_start"),
            *["content_block_delta"] * 4,
            *("content_block_stop", "message_delta", "message_stop"),
        ]
        start = events[0]["message"]
        assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
        assert start["usage"] == whole["usage"] | {"output_tokens": 0}
        assert events[2]["content_block"] == {"type": "text", "text": ""}
        assert [event["delta"] for event in events[3:7]] == [
            {"type": "text_delta", "text": character} for character in "aü🙂z"
        ]
        assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert events[-2]["usage"].items() <= whole["usage"].items()
        assert response.headers["request-id"] == start["id"] != whole["id"]

    serve(scenario, says("aü🙂z"))


@pytest.mark.parametrize(
    ("body", "text", "reason", "sequence"),
    [
        ({"stop_sequences": ["l"]}, "He", "stop_sequence", "l"),
        ({"stop_sequences": ["x", "o"]}, "Hell", "stop_sequence", "o"),
        ({"stop_sequences": []}, "Hello", "end_turn", None),
        ({"max_tokens": 2}, "He", "max_tokens", None),
        ({"max_tokens": 0}, "", "max_tokens", None),
        ({"max_tokens": 100_000}, "Hello", "end_turn", None),
    ],
)
def test_the_reason_of_the_end(
    serve: Serve, body: dict[str, Any], text: str, reason: str, sequence: str | None
) -> None:
    async def scenario(server: Any) -> None:
        message = await create(server, **body)
        content = [{"type": "text", "text": text}] if text else []
        assert message["content"] == content
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        stream = await server.http.post(MESSAGES, json=BODY | body | {"stream": True})
        delta = events_of(stream.text)[-2]["delta"]
        assert delta == {"stop_reason": reason, "stop_sequence": sequence}

    serve(scenario, says("Hello"))


def test_an_answer_that_fills_the_context_says_so(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        message = await create(server, max_tokens=32_000)
        assert message["stop_reason"] == "model_context_window_exceeded"
        usage = message["usage"]
        assert usage["input_tokens"] + usage["output_tokens"] == 256

    serve(scenario, FakeEngine())


def test_the_request_reaches_the_engine(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        await create(server, temperature=0.5, top_k=7, max_tokens=9, stop_sequences=["END"])
        sampling = server.engine.submitted[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
        assert (sampling.max_new_tokens, sampling.stop) == (9, ("END",))

    serve(scenario, sampling_defaults={"temperature": 0.2, "top_p": 0.9})


def test_an_answer_begun_by_the_client_is_continued(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        begun = [*HI, {"role": "assistant", "content": "The best answer is ("}]
        await create(server, system="Be brief.", messages=begun)
        prompt = bytes(
            token for token in server.engine.submitted[0].prompt().tolist() if token < 256
        ).decode()
        assert prompt == "system\nBe brief.\nuser\nhi\nassistant\nThe best answer is ("

    serve(scenario)


def test_what_agents_send_besides_is_accepted(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {
            "system": [
                {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}
            ],
            "metadata": {"user_id": "user_1"},
            "service_tier": "auto",
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "medium"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "cache_control": {"type": "ephemeral"},
            "model": "claude-sonnet-4-5",
        }
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
        answer = await server.http.post(MESSAGES, json=BODY | body, headers=headers)
        assert answer.json()["warnings"] == [
            "The key 'context_management' is unknown and was ignored.",
            "The model 'claude-sonnet-4-5' is not served here; org/tiny answered.",
        ]
        thinking = {"type": "enabled", "budget_tokens": 1024}
        answer = await create(server, max_tokens=2000, thinking=thinking)
        assert answer["warnings"] == [
            "thinking.budget_tokens has no effect here; max_tokens limits the whole answer."
        ]

    serve(scenario, says("Hello"))


def test_tokens_are_counted_without_an_engine(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.post(COUNT, json={"model": "default", "messages": HI})
        assert answer.json() == {
            "input_tokens": len(server.service.answering.text.tokenizer.encode(PROMPT))
        }
        system = "x" * 10
        more = await server.http.post(
            COUNT, json={"model": "default", "messages": HI, "system": system}
        )
        assert more.json()["input_tokens"] > answer.json()["input_tokens"] + 10
        assert server.engine.submitted == []

    serve(scenario)


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model must be a string, got null."),
    ({"messages": []}, "messages must not be empty."),
    ({"messages": "hi"}, "messages must be a list, got a string."),
    ({"messages": [5]}, "messages[0] must be an object, got a whole number."),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "got 'image'"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages must have at least one"),
    ({"max_tokens": None}, "max_tokens must be a whole number, got null."),
    ({"max_tokens": -1}, "max_tokens must be a whole number >= 0"),
    ({"max_tokens": 1.5}, "max_tokens must be a whole number, got a number that is not whole."),
    ({"temperature": "hot"}, "temperature must be a number, got a string."),
    ({"temperature": -1}, "temperature must be between 0 and"),
    ({"top_p": 0}, "top_p must be above 0"),
    ({"top_k": 0}, "top_k must be -1 (disable), or at least 1, got 0."),
    ({"stream": "yes"}, "stream must be true or false, got a string."),
    ({"stop_sequences": "x"}, "stop_sequences must be a list, got a string."),
    ({"stop_sequences": [""]}, "A stop string must not be empty."),
    ({"stop_sequences": ["x"] * 40}, "At most 32 stop strings are allowed, got 40."),
    ({"system": 5}, "system must be a string or a list, got a whole number."),
    ({"system": [{"type": "image"}]}, "system[0].type must be text, got 'image'"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing."),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name is missing."),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type is 'web_search_20250305', a tool that Anthropic defines",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type 'any' needs tools."),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing."),
    (
        {"tool_choice": {"type": "some"}},
        "tool_choice.type must be 'any', 'auto', 'none' or 'tool', not 'some'",
    ),
    ({"tool_choice": "auto"}, "tool_choice must be an object, got a string."),
    (
        {
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "tool", "name": "g"},
        },
        "tool_choice: Tool 'g' not found in tools list",
    ),
    (
        {"thinking": {"type": "between_tools"}},
        "thinking.type must be enabled, disabled, adaptive; got",
    ),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing."),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "thinking.budget_tokens must be at least 1024 and less than max_tokens (100), got 1024.",
    ),
    ({"service_tier": "gold"}, "service_tier must be 'auto' or 'standard_only', not 'gold'"),
    ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"a": "b" * (1 << 18)}}}},
        "output_config.format.schema must have at most",
    ),
    (
        {"mcp_servers": [{"url": "x"}]},
        "mcp_servers is not supported by this server yet; leave it out.",
    ),
    ({"mcp_servers": [{"url": "x"}], "model": None}, "model must be a string, got null."),
    ({"mcp_servers": [{"url": "x"}], "model": 3}, "model must be a string"),
    (
        {"messages": [{"role": "user", "content": "a" * 5000}]},
        "longer than the model's context",
    ),
]


@pytest.mark.parametrize("route", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_a_missing_model_is_named_before_a_key_that_is_not_supported(
    serve: Serve, route: str
) -> None:
    async def scenario(server: Any) -> None:
        body = {key: value for key, value in BODY.items() if key != "model"}
        for more in ({"mcp_servers": [{"url": "x"}]}, {"container": "c"}, {"what": 1}):
            answer = await server.http.post(route, json=body | more)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == "model is missing."

    serve(scenario)


def test_a_bad_field_is_named(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for changes, message in BAD_FIELDS:
            answer = await server.http.post(MESSAGES, json=BODY | changes)
            assert answer.status_code == 400, (changes, answer.text)
            error = answer.json()
            assert error.keys() == {"type", "error"}
            assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
            assert message in error["error"]["message"], changes
        assert server.engine.submitted == []

    serve(scenario)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (503, "overloaded_error"), (500, "api_error")],
)
def test_an_error_of_the_engine_has_its_type(serve: Serve, status: int, kind: str) -> None:
    refuse = Finish("abort", message="No.", status_code=status)

    async def scenario(server: Any) -> None:
        for stream in (False, True):
            answer = await server.http.post(MESSAGES, json=BODY | {"stream": stream})
            assert answer.status_code == status
            assert answer.json()["error"] == {"type": kind, "message": "No."}
            assert answer.headers["request-id"] == server.engine.submitted[-1].rid

    serve(scenario, FakeEngine(refuse=lambda request: refuse))


def test_an_abort_is_an_error_whole_and_in_mid_stream(serve: Serve) -> None:
    aborted = Finish("abort", message="Aborted.")
    engine = FakeEngine()
    engine.refuse = lambda request: (
        aborted if any(each.num_sent > 2 for each in engine.running.values()) else None
    )

    async def scenario(server: Any) -> None:
        whole = await server.http.post(MESSAGES, json=BODY)
        assert (whole.status_code, whole.json()["error"]["message"]) == (400, "Aborted.")
        stream = await server.http.post(MESSAGES, json=BODY | {"stream": True})
        *_, last = events_of(stream.text)
        assert last == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "Aborted."},
        }

    serve(scenario, engine)


def test_the_key_may_come_in_anthropics_header(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for headers, status in (
            ({}, 401),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401),
            ({"x-api-key": "Bearer secret"}, 401),
            ({"authorization": "secret"}, 401),
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret"}, 200),
            ({"authorization": "Bearer wrong", "x-api-key": "secret"}, 200),
        ):
            answer = await server.http.post(MESSAGES, json=BODY, headers=headers)
            assert answer.status_code == status, headers
            assert answer.headers["request-id"]
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"
        assert (await server.http.get("/v1/models", headers={"x-api-key": "secret"})).is_success

    serve(scenario, says("Hello"), api_key="secret")


def test_unknown_paths_and_methods_are_told_in_anthropics_shape(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        missing = await server.http.post("/v1/messages/batches", json={})
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        wrong = await server.http.get(MESSAGES)
        assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
        refused = await server.http.post(MESSAGES, json={})
        ids = {answer.headers["request-id"] for answer in (missing, wrong, refused)}
        assert len(ids) == 3
        counted = await server.http.post(f"{MESSAGES}/count_tokens", json=BODY)
        assert counted.headers["request-id"]

    serve(scenario)
