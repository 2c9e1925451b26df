"""A dialect answers for its paths in its own shape: refusals of its routes, of paths and methods
that it does not have, of a missing key, of what never becomes a request, and in mid-stream."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.errors import RequestError, err_type_of
from setpoint.core.request import RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.apis.dialects import DIALECTS
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.connection import MAX_HEAD_BYTES
from setpoint.frontend.http.dialect import Dialect, Dialects
from setpoint.frontend.http.sse import EventStream, event
from setpoint.frontend.jobs import Job
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.service import Service
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
LETTERS = "/v1/letters"


class Letters(Dialect):
    """A dialect below OpenAI's prefix, whose shape of an error is nobody else's."""

    prefix = LETTERS
    hint = "Letters go to /v1/letters."

    def __init__(self, service: Service, models: Sequence[Service], bodies: BodyReader) -> None:
        self._service = service
        self.routes = Routes()
        self.routes.add(LETTERS, self.create, "POST")

    def error_body(self, refusal: Refusal) -> Any:
        return {
            "type": "error",
            "error": {"type": err_type_of(refusal.status_code), "message": refusal.message},
        }

    def stream_end(self, refusal: Refusal | None) -> bytes:
        if refusal is None:
            return b"event: message_stop\n\n"
        return b"event: error\n" + event(self.error_body(refusal))

    async def create(self, request: Request) -> Response:
        if await request.body() == b"refuse":
            raise RequestError("No letters today.")
        prompt = await self._service.answering.intake.encode("abc")
        requests = self._service.answering.intake.requests(
            prompt, SamplingParams(max_new_tokens=3), RequestOptions(stream=True)
        )
        job = self._service.answering.jobs.make(requests, received={})
        return EventStream(job, self._chunks(job), self.stream_end)

    async def _chunks(self, job: Job) -> AsyncGenerator[bytes, None]:
        async for pieces in job.pieces():
            for piece in pieces:
                yield event(piece.text)


ALL = (*DIALECTS, Letters)


def is_letters(answer: Any) -> bool:
    return isinstance(answer, dict) and answer.keys() == {"type", "error"}


def is_openais(answer: Any) -> bool:
    return isinstance(answer, dict) and answer.get("object") == "error"


@pytest.mark.parametrize(
    ("method", "path", "status_code", "is_shape"),
    [
        ("GET", LETTERS, 405, is_letters),
        ("POST", f"{LETTERS}/count", 404, is_letters),
        ("POST", "/v1/lettersx", 404, is_openais),
        ("POST", "/v1/nothing", 404, is_openais),
        ("GET", "/v1/chat/completions", 405, is_openais),
        ("POST", "/nothing", 404, is_openais),
        ("POST", "/x" * 10_000, 404, is_openais),
        ("GET", "/generate", 405, is_openais),
    ],
)
def test_what_has_no_route_is_refused_in_the_shape_of_its_path(
    serve: Serve, method: str, path: str, status_code: int, is_shape: Callable[[Any], bool]
) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.request(method, f"http://test{path}", json={})
        assert answer.status_code == status_code
        assert is_shape(answer.json()), answer.text

    serve(scenario, dialects=ALL)


def test_a_route_refuses_in_the_shape_of_its_dialect(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.post(LETTERS, content=b"refuse")
        assert answer.status_code == 400
        assert answer.json()["error"] == {"type": "BadRequestError", "message": "No letters today."}

    serve(scenario, dialects=ALL)


def test_a_missing_key_is_told_in_the_shape_of_the_path(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for path, is_shape in ((LETTERS, is_letters), ("/v1/completions", is_openais)):
            answer = await server.http.post(path)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert is_shape(answer.json())

    serve(scenario, dialects=ALL, api_key="secret")


def test_a_foreign_page_is_refused_in_the_shape_of_the_path(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        foreign = {"origin": "http://evil.example"}
        assert is_letters((await server.http.post(LETTERS, headers=foreign)).json())
        assert is_openais((await server.http.post("/generate", headers=foreign)).json())

    serve(scenario, dialects=ALL, local_only=True)


def test_a_stream_ends_as_its_dialect_ends_one(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        whole = await server.http.post(LETTERS)
        assert whole.text.endswith('data: "c"\n\nevent: message_stop\n\n')
        server.line.died("It was unplugged.")
        assert is_letters((await server.http.post(LETTERS)).json())

    serve(scenario, dialects=ALL)


def test_an_error_in_mid_stream_has_the_shape_of_its_dialect(serve: Serve) -> None:
    engine = FakeEngine(step_s=0.005)

    async def scenario(server: Any) -> None:
        lines = []

        async def read() -> None:
            async with server.http.stream("POST", LETTERS) as response:
                lines.extend([line async for line in response.aiter_lines()])

        reading = asyncio.create_task(read())
        while not engine.running or not next(iter(engine.running.values())).num_sent:
            await asyncio.sleep(0.001)
        engine.silent = True
        server.line.died("It was unplugged.")
        await reading
        assert lines[-3] == "event: error"
        assert is_letters(json.loads(lines[-2].removeprefix("data: ")))

    serve(scenario, engine, dialects=ALL)


@pytest.mark.parametrize(
    ("path", "is_shape"), [(LETTERS, is_letters), ("/v1/completions?a=b", is_openais)]
)
def test_what_never_becomes_a_request_is_refused_in_the_shape_of_its_path(
    http_url: Callable[..., str], path: str, is_shape: Callable[[Any], bool]
) -> None:
    parts = urlsplit(http_url(FakeEngine(), dialects=ALL))
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=10) as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx: ".encode())
        sock.sendall(b"a" * (MAX_HEAD_BYTES + 1))
        answer = b""
        while piece := sock.recv(1 << 16):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert is_shape(json.loads(answer.partition(b"\r\n\r\n")[2]))


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("", ""),
        ("/", ""),
        ("*", ""),
        ("/generate", ""),
        ("/generate/more", ""),
        ("/v1", "/v1"),
        ("/v1/", "/v1"),
        ("/v1x", ""),
        ("/v1/models/org/tiny", "/v1"),
        ("/v1/tokenize", ""),
        ("/v1/letters", LETTERS),
        ("/v1/messages/count_tokens", "/v1/messages"),
        ("/v1/letters/batches/1/2/3/4", LETTERS),
        ("/v1/letters-of-mine", "/v1"),
    ],
)
def test_the_longest_claim_wins(serve: Serve, path: str, owner: str) -> None:
    async def scenario(server: Any) -> None:
        dialects: Dialects = server.app.state.dialects
        assert dialects.of(path).prefix == owner

    serve(scenario, dialects=ALL)
