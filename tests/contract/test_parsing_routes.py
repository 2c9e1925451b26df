"""The routes that parse text: /parse_function_call and /separate_reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from setpoint.frontend.apis.sglang import parsing
from setpoint.frontend.chat.deltas import Delta
from setpoint.frontend.chat.parser import PlainParser
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
TOOLS = [{"type": "function", "function": {"name": "ping", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "ping", "arguments": {"a": "é"}}\n</tool_call>'


def engine() -> FakeEngine:
    return FakeEngine(script=lambda request: list(b"x"))


def test_calls_are_taken_out_of_a_text(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for parser in ("qwen25", "hermes"):
            body = {"text": f"Hm.\n{CALL}\n{CALL}", "tools": TOOLS, "tool_call_parser": parser}
            response = await server.http.post("/parse_function_call", json=body)
            assert response.status_code == 200
            assert response.json() == {
                "normal_text": "Hm.",
                "calls": [
                    {"tool_index": index, "name": "ping", "parameters": '{"a": "é"}'}
                    for index in (0, 1)
                ],
            }

    serve(scenario, engine())


def test_reasoning_is_taken_out_of_a_text(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for parser, text, expected in (
            ("deepseek-r1", "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
            ("qwen3", "<think>\nHm.</think>Yes.", ("Hm.", "Yes.")),
            ("qwen3", "Yes.", ("", "Yes.")),
        ):
            body = {"text": text, "reasoning_parser": parser}
            response = await server.http.post("/separate_reasoning", json=body)
            assert response.json() == {"reasoning_text": expected[0], "text": expected[1]}

    serve(scenario, engine())


def test_the_servers_own_formats(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for name in (None, "auto"):
            body = {"text": CALL, "tools": [], "tool_call_parser": name}
            response = await server.http.post("/parse_function_call", json=body)
            assert len(response.json()["calls"]) == 1
            response = await server.http.post(
                "/separate_reasoning", json={"text": "<think>a</think>b", "reasoning_parser": name}
            )
            assert response.json() == {"reasoning_text": "a", "text": "b"}

    serve(scenario, engine(), tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/parse_function_call", {"tools": TOOLS}, "text"),
        ("/parse_function_call", {"text": 1}, "text"),
        ("/parse_function_call", {"text": CALL}, "tool_call_parser"),
        (
            "/parse_function_call",
            {"text": CALL, "tool_call_parser": "qwen26"},
            "Did you mean qwen25",
        ),
        ("/parse_function_call", {"text": CALL, "tool_call_parser": "none"}, "tool_call_parser"),
        ("/parse_function_call", {"text": CALL, "tool_call_parser": 3}, "tool_call_parser"),
        ("/parse_function_call", {"text": CALL, "tools": [{"type": "x"}]}, "tools"),
        (
            "/separate_reasoning",
            {"text": CALL, "reasoning_parser": "x" * 10_000},
            "reasoning_parser",
        ),
        ("/separate_reasoning", {"text": None, "reasoning_parser": "qwen3"}, "text"),
        ("/separate_reasoning", {"text": "x"}, "reasoning_parser"),
        ("/separate_reasoning", [], "object"),
    ],
)
def test_what_cannot_be_parsed_is_refused_by_name(
    serve: Serve, path: str, body: Any, words: str
) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(path, json=body)
        assert response.status_code == 400
        assert words in response.json()["message"]
        assert len(response.json()["message"]) < 2000

    serve(scenario, engine())


class _Counting(PlainParser):
    """Counts the characters that it is given."""

    num_chars = 0

    def feed(self, text: str) -> Sequence[Delta]:
        self.num_chars += len(text)
        return super().feed(text)


class _Format:
    def __init__(self) -> None:
        self.made = _Counting()

    def parser(self, *args: Any, **kwargs: Any) -> _Counting:
        return self.made

    def starts_inside(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("route", "kind"),
    [("/parse_function_call", "tool"), ("/separate_reasoning", "reasoning")],
)
def test_the_work_ends_when_the_client_leaves(
    serve: Serve, route: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: a thread parsed on to the end of the text."""
    form, text = _Format(), "x" * 500_000
    monkeypatch.setattr(parsing, f"{kind}_format", lambda name: form)
    body = msgspec.json.encode(
        {"text": text, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    )
    arrives: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
    sent = []

    async def receive() -> Any:
        return arrives.pop(0) if arrives else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def scenario(server: Any) -> None:
        headers = [(b"host", b"test"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": route,
            "raw_path": route.encode(),
            "query_string": b"",
            "headers": headers,
        }
        await server.app(scope, receive, send)
        assert 0 < form.made.num_chars <= parsing.SLICE_CHARS
        response = await server.http.post(route, content=body, headers=dict(headers))
        assert response.status_code == 200
        assert form.made.num_chars > len(text)

    serve(scenario, engine())


def test_a_text_that_is_longer_than_any_answer_is_refused(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for route in ("/parse_function_call", "/separate_reasoning"):
            response = await server.http.post(
                route,
                json={
                    "text": "x" * (parsing.MAX_CHARS + 1),
                    "tool_call_parser": "glm45",
                    "reasoning_parser": "qwen3",
                },
            )
            assert response.status_code == 400
            assert "text must have at most 1048576 characters, got 1048577." in response.text

    serve(scenario, engine())
