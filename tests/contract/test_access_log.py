"""The line of a request in the access log: how long it took, where the time went, why it was
refused."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from setpoint.core.errors import RequestError
from setpoint.core.messages import Alive, Finish
from setpoint.frontend.http.access import AccessLogMiddleware
from setpoint.frontend.job_maker import JobMaker
from setpoint_testing.fake_engine import FakeEngine
from setpoint_testing.server_process import wait_until

Serve = Callable[..., None]
FORGED = 'x\n[2026-01-01 00:00:00] "GET / HTTP/1.1" 503'
MESSAGES = [{"role": "user", "content": "Hello"}]

ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "abc", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2, "model": "m"},
    "/api/chat": {"messages": MESSAGES, "model": "m", "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "abc", "model": "m", "options": {"num_predict": 2}},
    "/v1/score": {"query": "ab", "items": ["c"], "label_token_ids": [1]},
}
"""A body for each route that generates."""


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]


def test_a_line_says_where_the_time_went(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def scenario(server: Any) -> None:
        for stream in (False, True):
            sampling = {"max_new_tokens": 3}
            body = {"text": "abcd", "rid": f"r{stream}", "stream": stream}
            await server.http.post("/generate", json=body | {"sampling_params": sampling})

    serve(scenario, FakeEngine(num_cached=2))
    for line, stream in zip(lines(caplog), (False, True), strict=True):
        assert re.fullmatch(
            r'\S+ - "POST /generate HTTP/1\.1" 200, \d+\.\d{3} s, '
            rf"rid=r{stream}, queue 0\.250 s, first token \d+\.\d{{3}} s,"
            r" prompt 4, cached 2, output 3, length",
            line,
        ), line


def test_several_sequences_share_a_line(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def scenario(server: Any) -> None:
        await server.generate(text="ab", rid="a", sampling_params={"max_new_tokens": 3, "n": 2})

    serve(scenario, FakeEngine())
    (line,) = lines(caplog)
    assert "rid=a_0 and 1 more, " in line
    assert line.endswith("prompt 4, cached 0, output 6, length")


def test_a_refused_order_has_its_reason(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Red before: routes whose refusals have a format of their own said nothing in the log."""
    caplog.set_level("INFO")

    async def scenario(server: Any) -> None:
        async def refused(status: int, path: str, body: Any = None, method: str = "POST") -> str:
            caplog.clear()
            answer = await server.http.request(method, path, json=body)
            assert answer.status_code == status, answer.text
            (line,) = lines(caplog)
            return line.partition(", refused: ")[2]

        server.engine.max_running = 0
        busy = asyncio.create_task(server.generate(text="a", sampling_params={"max_new_tokens": 1}))
        while not server.engine.running:
            await asyncio.sleep(0)
        why = "Cache not flushed: there are pending requests. Pause first (POST /pause_generation"
        assert (await refused(400, "/flush_cache")).startswith(why)
        server.engine.max_running = 1
        await busy
        body = {"model_path": "elsewhere"}
        why = await refused(400, "/update_weights_from_disk", body)
        assert why == "This server cannot load other weights."
        assert "'nope' does not exist" in await refused(404, "/v1/models/nope", method="GET")
        server.engine.emit(Alive(stands_still=True))
        server.line.still_since -= 3600
        assert await refused(503, "/ready", method="GET") == "engine 0: stands still"
        server.service.drain.is_on = True
        assert await refused(503, "/health", method="GET") == "draining"

    serve(scenario, FakeEngine())


def test_a_probe_has_a_short_line(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def scenario(server: Any) -> None:
        await server.http.get("/ready?a=b")

    serve(scenario, FakeEngine())
    (line,) = lines(caplog)
    assert re.fullmatch(r'\S+ - "GET /ready\?a=b HTTP/1\.1" 200, \d+\.\d{3} s', line), line


@pytest.mark.parametrize("route", ROUTES)
def test_every_refusal_has_its_reason(
    serve: Serve, caplog: pytest.LogCaptureFixture, route: str
) -> None:
    """Red before: the reason of a refused request was in no log."""
    caplog.set_level("INFO")

    async def scenario(server: Any) -> None:
        async def refused(status: int, body: Any) -> str:
            caplog.clear()
            content = body if isinstance(body, bytes) else json.dumps(body)
            answer = await server.http.post(route, content=content)
            assert answer.status_code == status, answer.text
            (line,) = lines(caplog)
            assert f'" {status}, ' in line
            return line

        key = next(iter(ROUTES[route]))
        assert f"refused: {key}" in await refused(400, {**ROUTES[route], key: 12})
        assert ", refused: " in await refused(400, b"[")
        server.engine.refuse = lambda request: Finish(
            "abort", message="The request queue is full.", status_code=503
        )
        line = await refused(503, ROUTES[route])
        assert line.endswith(", abort, refused: The request queue is full.")
        server.line.died("It was killed.")
        assert "refused: It was killed." in await refused(503, ROUTES[route])

    serve(scenario, FakeEngine())


def test_refusals_of_the_server_itself(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def scenario(server: Any) -> None:
        await server.http.post("/generate", json={"text": "a"})
        await server.http.get("/generte", headers={"authorization": "Bearer k"})

    serve(scenario, FakeEngine(), api_key="k")
    keyless, unknown = lines(caplog)
    assert '" 401, ' in keyless
    assert "refused: The API key is missing or wrong." in keyless
    assert '" 404, ' in unknown
    assert "did you mean /generate?" in unknown


def test_a_stream_that_was_cut_short_says_why(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def scenario(server: Any) -> None:
        body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 200}}
        answer = asyncio.create_task(server.http.post("/generate", json=body))
        while not any(each.num_sent for each in server.engine.running.values()):
            await asyncio.sleep(0)
        server.line.died("It was killed.")
        await answer
        server.engine.running.clear()

    serve(scenario, FakeEngine(step_s=0.001))
    (line,) = lines(caplog)
    assert '" 200, ' in line
    assert line.endswith(", left, refused: It was killed.")


def test_an_error_of_ours_is_a_500(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def scenario(server: Any) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise RuntimeError

        scope = {"type": "http", "method": "GET", "path": "/x", "http_version": "1.1"}
        with pytest.raises(RuntimeError):
            await AccessLogMiddleware(app)(
                scope | {"query_string": b"", "client": None}, None, None
            )

    serve(scenario, FakeEngine())
    (line,) = lines(caplog)
    assert '"GET /x HTTP/1.1" 500, ' in line


def test_a_client_writes_no_line_of_its_own(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")

    async def scenario(server: Any) -> None:
        def refuse(*args: Any, **kinds: Any) -> None:
            raise RequestError(FORGED * 10_000)

        monkeypatch.setattr(JobMaker, "make", refuse)
        await server.http.post("/generate", json=ROUTES["/generate"])
        await server.http.get("/" + "y" * 10_000)

    serve(scenario, FakeEngine())
    assert len(lines(caplog)) == 2
    for line in lines(caplog):
        assert line.isprintable()
        assert len(line) < 1000


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"NONSENSE\r\n\r\n", 400), (b"GET /generate HTTP/1.1\r\nx: " + b"a" * (1 << 17), 431)],
)
def test_what_never_becomes_a_request_has_a_line(
    http_url: Callable[..., str], caplog: pytest.LogCaptureFixture, sent: bytes, status: int
) -> None:
    caplog.set_level("INFO")
    parts = urlsplit(http_url(FakeEngine()))
    assert parts.hostname is not None
    assert parts.port is not None
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as sock:
        sock.sendall(sent)
        while sock.recv(1 << 16):
            pass
    wait_until(lambda: bool(lines(caplog)))
    (line,) = lines(caplog)
    assert re.search(rf'" {status}, \d+\.\d{{3}} s, refused: The request ', line), line


def test_a_client_that_left_is_told_from_one_that_stayed(
    http_url: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = FakeEngine(script=lambda request: [120], step_s=0.001, context_len=100_000)
    parts = urlsplit(http_url(engine))
    assert parts.hostname is not None
    assert parts.port is not None
    body = b'{"text": "a", "stream": true, "sampling_params": {"max_new_tokens": 50000}}'
    head = (
        "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as sock:
        sock.sendall(head.encode() + body)
        assert sock.recv(100)
    wait_until(lambda: bool(lines(caplog)))
    assert lines(caplog)[0].endswith(", left")
