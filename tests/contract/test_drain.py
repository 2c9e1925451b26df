"""A server that drains: no new requests, in any API; probes and clients learn why; what runs goes
on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from setpoint.frontend.drain import RETRY_AFTER_S
from setpoint_testing.fake_engine import FakeEngine
from setpoint_testing.server_process import PATIENCE_S

Serve = Callable[..., None]
MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/v1/completions": {"model": "default", "prompt": "a"},
    "/v1/chat/completions": {"model": "default", "messages": MESSAGES},
    "/v1/responses": {"model": "default", "input": "hi"},
    "/v1/messages": {"model": "default", "messages": MESSAGES, "max_tokens": 99},
    "/api/generate": {"model": "default", "prompt": "a"},
    "/api/chat": {"model": "default", "messages": MESSAGES},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_new_requests_are_refused_with_a_reason(serve: Serve, path: str, stream: bool) -> None:
    async def scenario(server: Any) -> None:
        server.service.drain.begin()
        response = await server.http.post(path, json={**ROUTES[path], "stream": stream})
        assert response.status_code == 503, response.text
        assert response.headers["retry-after"] == str(RETRY_AFTER_S)
        assert "shutting down" in response.text
        assert not server.engine.submitted

    serve(scenario)


@pytest.mark.parametrize("path", ["/ready", "/ping", "/health", "/health_generate"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_probes_learn_that_it_drains(serve: Serve, path: str, method: str) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.http.request(method, path)).status_code == 200
        server.service.drain.begin()
        response = await server.http.request(method, path)
        assert response.status_code == 503
        assert response.text == ("draining\n" if method == "GET" else "")
        for other in ("/v1/models", "/server_info"):
            assert (await server.http.get(other)).status_code == 200

    serve(scenario)


def test_what_runs_goes_on(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        sampling = {"max_new_tokens": 20, "ignore_eos": True}
        asked = asyncio.create_task(server.generate(text="a", sampling_params=sampling))
        while not server.engine.running:
            await asyncio.sleep(0.001)
        server.service.drain.begin()
        assert (await asked)["meta_info"]["completion_tokens"] == 20

    serve(scenario, FakeEngine(step_s=0.01))


def test_answers_of_a_draining_server_are_the_last_of_their_connections(
    http_url: Callable[..., str],
) -> None:
    """So that the next request finds another server behind the same address."""
    services: list[Any] = []
    url = http_url(FakeEngine(), made=services)
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        assert "connection" not in client.get("/ready").headers
        services[0].drain.begin()
        response = client.get("/ready")
        assert (response.status_code, response.headers["connection"]) == (503, "close")
        assert client.get("/ready").status_code == 503, "a new connection is served"


ABORTED = {
    "/generate": ('"type":"abort"', "The server is shutting down."),
    "/v1/completions": ('"finish_reason":"abort"',),
    "/v1/chat/completions": ('"finish_reason":"abort"',),
    "/v1/responses": ("response.failed", "The server is shutting down."),
    "/v1/messages": ("overloaded_error", "The server is shutting down."),
    "/api/generate": ("error", "The server is shutting down."),
    "/api/chat": ("error", "The server is shutting down."),
}


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_that_is_cut_says_so_in_its_api_s_words(serve: Serve, path: str) -> None:
    async def scenario(server: Any) -> None:
        body = {**ROUTES[path], "stream": True}
        asked = asyncio.create_task(server.http.post(path, json=body))
        while not server.engine.running:
            await asyncio.sleep(0.001)
        server.service.drain.begin()
        server.service.drain.cut(server.service.engine)
        text = (await asked).text.replace(": ", ":")
        for words in ABORTED[path]:
            assert words.replace(": ", ":") in text, text

    serve(scenario, FakeEngine(step_s=0.01, script=lambda request: [97]))


@pytest.mark.parametrize("path", ROUTES)
def test_a_whole_answer_that_is_cut_says_so(serve: Serve, path: str) -> None:
    async def scenario(server: Any) -> None:
        body = {**ROUTES[path], "stream": False}  # Ollama's routes stream if it is left out
        asked = asyncio.create_task(server.http.post(path, json=body))
        while not any(each.num_sent for each in server.engine.running.values()):
            await asyncio.sleep(0.001)
        server.service.drain.begin()
        server.service.drain.cut(server.service.engine)
        response = await asked
        if path in ("/v1/messages", "/api/generate", "/api/chat"):
            assert response.status_code == 503
            assert "The server is shutting down." in response.text
        else:
            assert response.status_code == 200
            assert "abort" in response.text or "shutting down" in response.text

    serve(scenario, FakeEngine(step_s=0.01, script=lambda request: [97]))
