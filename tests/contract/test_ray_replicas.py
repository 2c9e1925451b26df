"""What a replica of Ray Serve does with HTTP, without Ray: the prompts of a body are those that the
engine gets, in every dialect, and an answer in parts is the application's."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from rayserve import routes
from rayserve.exchange import HttpRequest, Start, answer
from rayserve.prompts import PromptReader
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": ["one", "two"], "extra_key": "mine"},
    "/v1/completions": {"model": "default", "prompt": "a", "n": 2},
    "/v1/chat/completions": {"model": "default", "messages": MESSAGES, "stream": True},
    "/v1/messages": {"model": "default", "messages": MESSAGES, "max_tokens": 5},
    "/api/generate": {"model": "default", "prompt": "a"},
    "/api/chat": {"model": "default", "messages": MESSAGES},
}


def request(path: str, body: dict[str, Any]) -> HttpRequest:
    headers = [(b"content-type", b"application/json")]
    return HttpRequest("POST", path, b"", headers, json.dumps(body).encode())


@pytest.mark.parametrize("path", BODIES)
def test_the_prompts_are_those_of_the_engine(
    serve: Serve, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: Any) -> None:
        reader = PromptReader(server.service)
        caplog.set_level(logging.INFO, logger="uvicorn.access")
        found = await reader.read(request(path, BODIES[path]))
        assert not server.engine.submitted
        assert server.service.events.book.info()["num_sequences"] == 0
        assert caplog.messages == []
        assert (await server.http.post(path, json=BODIES[path])).status_code == 200
        assert len(caplog.messages) == 1
        sent = server.engine.submitted
        assert found == [(each.prompt_ids, each.options.namespace) for each in sent]
        assert len(found) in (1, 2)

    serve(scenario)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages": 5}'])
def test_a_body_that_will_be_refused_has_no_prompts(serve: Serve, body: bytes) -> None:
    async def scenario(server: Any) -> None:
        asked = HttpRequest("POST", "/v1/chat/completions", b"", [], body)
        assert await PromptReader(server.service).read(asked) == []

    serve(scenario)


def test_an_answer_in_parts_is_the_answer(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 20}}
        start, *parts = [part async for part in answer(server.app, request("/generate", body))]
        assert isinstance(start, Start)
        assert start.status == 200
        assert (b"content-type", b"text/event-stream") in [
            (name, value.partition(b";")[0]) for name, value in start.headers
        ]
        text = b"".join(part for part in parts if isinstance(part, bytes))
        assert text.endswith(b"data: [DONE]\n\n")
        assert text.count(b"data: ") > 2

    serve(scenario)


def test_a_reader_that_leaves_ends_the_request(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 200}}
        parts = answer(server.app, request("/generate", body))
        assert isinstance(await anext(parts), Start)
        await anext(parts)
        assert server.engine.running
        await parts.aclose()  # type: ignore[attr-defined]
        while server.engine.running:
            await asyncio.sleep(0.01)

    serve(scenario, FakeEngine(step_s=0.02))


def test_an_application_that_fails_is_not_silent() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            [part async for part in answer(app, request("/generate", {}))]

    asyncio.run(main())


def test_what_the_ingress_passes_on_is_there(serve: Serve) -> None:
    """No name is misspelt, and what concerns one server is refused."""

    async def scenario(server: Any) -> None:
        known = {route.path for route in server.app.routes}
        assert {*routes.PROMPTS, *routes.OTHERS} <= known

    serve(scenario)
    assert routes.refusal("/v1/chat/completions") is None
    assert routes.refusal("/v1/models/some/name") is None
    for path in ("/flush_cache", "/v1/responses", "/v1/files", "/metrics", "/nowhere"):
        assert path in str(routes.refusal(path))
