"""Bodies that a client has compressed are decoded within the limits of other bodies; an encoding
that is unknown is refused by its name."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import zstandard
from starlette.responses import PlainTextResponse

from conftest import make_service
from setpoint.frontend.apis.dialects import DIALECTS
from setpoint.frontend.http.app import create_app
from setpoint.frontend.http.content_encoding import (
    SLICE_BYTES,
    ContentEncodingMiddleware,
    _Body,
)
from setpoint.frontend.http.model_choice import ModelChoice
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
BODY = json.dumps({"text": "ab", "sampling_params": {"max_new_tokens": 1}}).encode()


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return made.compress(data) + made.flush()


ENCODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "capital letters": ("GZIP", gzip.compress),
    "two members": ("gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", raw_deflate),
    "zstd": ("zstd", zstandard.compress),
    "identity": ("identity", bytes),
}


async def post(server: Any, encoding: str, content: bytes, path: str = "/generate") -> Any:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return await server.http.post(path, content=content, headers=headers)


@pytest.mark.parametrize("case", ENCODINGS)
def test_a_compressed_body_is_read(serve: Serve, case: str) -> None:
    """Red before: 400, "The body is not valid JSON", except for identity."""

    async def scenario(server: Any) -> None:
        encoding, encode = ENCODINGS[case]
        for length in (0, 300_000):
            body = json.loads(BODY) | {"ignored": "x" * length}
            answer = await post(server, encoding, encode(json.dumps(body).encode()))
            assert answer.status_code == 200, answer.text
            assert answer.json()["text"] == "a"

    serve(scenario)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize("encoding", ["br", "aws-chunked", "gzip, gzip"])
def test_an_unknown_encoding_is_refused_by_its_name(serve: Serve, encoding: str, path: str) -> None:
    """Red before: 400, "The body is not valid JSON"."""

    async def scenario(server: Any) -> None:
        answer = await post(server, encoding, b"\x0b\x02\x80{}\x03", path)
        assert answer.status_code == 415
        assert f"encoding '{encoding}' is not supported" in answer.text
        assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"

    serve(scenario)


@pytest.mark.parametrize("case", ["gzip", "deflate", "raw deflate", "zstd"])
def test_a_broken_body_is_a_400(serve: Serve, case: str) -> None:
    async def scenario(server: Any) -> None:
        encoding, encode = ENCODINGS[case]
        whole = encode(BODY)
        for content in (whole[:-6], b"\x00\xff{}" * 9, b"x"):
            answer = await post(server, encoding, content)
            assert answer.status_code == 400, (content, answer.text)
        assert not server.engine.submitted

    serve(scenario)


@pytest.mark.parametrize("case", ["gzip", "deflate", "zstd"])
def test_a_bomb_is_bounded_by_the_limit_of_bodies(serve: Serve, case: str) -> None:
    """40 MB in a few hundred kilobytes or less: refused at the limit, without being decoded
    whole."""

    async def scenario(server: Any) -> None:
        encoding, encode = ENCODINGS[case]
        bomb = encode(b" " * 40_000_000)
        assert len(bomb) < server.service.config.max_body_bytes
        answer = await post(server, encoding, bomb)
        assert answer.status_code == 413
        assert "--max-body-bytes" in answer.text

    serve(scenario)


def test_never_more_than_a_piece_is_held() -> None:
    """What is decoded before anybody asks for it is bounded, whatever the body says."""

    async def scenario() -> None:
        bomb = zstandard.compress(bytes(1 << 26))

        async def receive() -> Any:
            return {"type": "http.request", "body": bomb, "more_body": False}

        body = _Body("zstd", receive)
        for _ in range(4):
            piece = await body.receive()
            assert len(piece["body"]) <= SLICE_BYTES // 4 * (128 << 10) + (1 << 16)

    asyncio.run(scenario())


def test_the_model_of_a_compressed_body_is_found() -> None:
    """A server with several models reads the body before the routes do. Red before: the first
    model got it."""

    async def scenario() -> None:
        dialects = create_app(make_service(FakeEngine()), DIALECTS).state.dialects
        choice = ModelChoice(
            PlainTextResponse("first"),
            first="first",
            others={"second": PlainTextResponse("second")},
            max_body_bytes=1 << 20,
            dialects=dialects,
        )
        app = ContentEncodingMiddleware(choice, dialects=dialects)
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            headers = {"content-encoding": "gzip"}
            body = gzip.compress(b'{"model": "second"}')
            answer = await http.post("/v1/completions", content=body, headers=headers)
            assert answer.text == "second"
            answer = await http.post("/v1/completions", content=body[:-9], headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (
                400,
                "invalid_request_error",
            )

    asyncio.run(scenario())
