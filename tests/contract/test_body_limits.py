"""Bodies are bounded in bytes and in parts, before they are decoded, and long ones are worked on
off the event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

Serve = Callable[..., None]
CHAT = "/v1/chat/completions"


def test_a_big_body(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for body in (
            {"text": "a" * 4_000_000},
            {"text": "a " * 2_000_000},
            {"input_ids": [7] * 1_000_000},
        ):
            response = await server.http.post("/generate", json=body)
            assert response.status_code == 400
            assert "longer than the model's context length" in response.json()["error"]["message"]
        fits = {"text": "a", "ignored": "x" * 4_000_000, "sampling_params": {"max_new_tokens": 1}}
        assert (await server.generate(**fits))["text"] == "a"
        for route in ("/generate", "/v1/completions", "/tokenize", "/abort_request"):
            response = await server.http.post(
                route,
                content=b" " * (4 << 20) + b"{}",
                headers={"content-type": "application/json"},
            )
            assert response.status_code == 413
            assert "--max-body-bytes" in response.text

    serve(scenario)


def test_the_largest_body_is_an_option(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.generate(text="a", ignored="x" * 900))["text"]
        assert (
            await server.http.post("/generate", json={"text": "a", "ignored": "x" * 1000})
        ).status_code == 413

    serve(scenario, max_body_bytes=1000)


def test_a_body_is_counted_before_it_is_decoded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Structural: what would take long never reaches the decoder, and what is long never runs in
    the event loop's thread."""
    decoded_in: list[str] = []
    decode = msgspec.json.decode

    def noting(data: bytes) -> Any:
        decoded_in.append(threading.current_thread().name)
        return decode(data)

    monkeypatch.setattr("setpoint.frontend.bodies.msgspec.json.decode", noting)

    async def scenario(server: Any) -> None:
        for route, body in {
            "/generate": b'{"input_ids": [' + b"[]," * 140_000 + b"[]]}",
            "/v1/completions": b'{"prompt": [' + b"[]," * 140_000 + b"[]]}",
            "/tokenize": b'{"prompt": [' + b'"",' * 140_000 + b'""]}',
            CHAT: b'{"messages": [' + b'{"role":"user","content":"a"},' * 70_000 + b"{}]}",
            "/encode": b'{"text": "a", "image_data": ' + b"[" * 200 + b"]" * 200 + b"}",
        }.items():
            response = await server.http.post(
                route, content=body, headers={"content-type": "application/json"}
            )
            assert response.status_code == 400
            assert response.json()["message"].startswith("The body has more than")
        assert not decoded_in
        await server.generate(text="a")
        await server.generate(text="a", ignored="x" * 100_000)
        for route, body in {
            "/tokenize": {"prompt": "a" * 70_000},
            "/v1/completions": {"prompt": "a", "max_tokens": 1, "user": "x" * 70_000},
        }.items():
            assert (await server.http.post(route, json=body)).status_code == 200
        assert decoded_in == ["MainThread"] + ["bodies_0"] * 3

    serve(scenario)


def test_lists_of_lists_do_not_end_in_a_recursion(serve: Serve) -> None:
    """Red before: 500, at about 500 lists in each other."""

    async def scenario(server: Any) -> None:
        for depth in (50, 99, 600, 900):
            body = b'{"text": "a", "image_data": ' + b"[" * depth + b"]" * depth + b"}"
            response = await server.http.post(
                "/generate", content=body, headers={"content-type": "application/json"}
            )
            assert response.status_code == 400

    serve(scenario)
