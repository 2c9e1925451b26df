"""Streams of ``/generate``, whose chunks repeat what came before: what they have and what they
cost."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest
from answers import says
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from setpoint.frontend.apis.sglang import repeated_chunks
from setpoint.frontend.http.connection import Connection
from setpoint.frontend.http.port import bind_socket
from setpoint.frontend.http.serve import small_server
from setpoint.frontend.telemetry.metrics.metering import MetricsConfig
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
TEXT = 'Ça "va" – \\ 日本\u2028\n' * 8
ASKED: list[dict[str, Any]] = [
    {},
    {"return_logprob": True},
    {"return_logprob": True, "top_logprobs_num": 3, "return_text_in_logprobs": True},
    {"return_logprob": True, "token_ids_logprob": [5, 7], "logprob_start_len": 0},
    {"return_prompt_token_ids": True, "return_logprob": True, "logprob_start_len": 2},
]


async def chunks_of(server: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await server.http.post("/generate", json={**body, "stream": True})
    lines = [line for line in response.text.split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    meta = {
        name: value
        for name, value in answer["meta_info"].items()
        if name not in ("id", "e2e_latency")
    }
    return {**answer, "meta_info": meta}


@pytest.mark.cases(10)
@pytest.mark.parametrize("rate", [1, repeated_chunks.RATE])
@pytest.mark.parametrize("tokens_per_event", [1, 7])
@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_the_last_chunk_is_the_whole_answer(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    num_samples: int,
    tokens_per_event: int,
    rate: int,
) -> None:
    monkeypatch.setattr(repeated_chunks, "RATE", rate)
    monkeypatch.setattr(repeated_chunks, "FREE_BYTES", 4096)

    async def scenario(server: Any) -> None:
        sampling = {"n": num_samples, "sampling_seed": 1, "max_new_tokens": 90}
        body = {"text": "abcd", "sampling_params": sampling, **asked}
        whole = await server.generate(**body)
        for index, answer in enumerate(whole if num_samples > 1 else [whole]):
            chunks = await chunks_of(server, body)
            own = [chunk for chunk in chunks if chunk.pop("index", 0) == index]
            assert without_times(own[-1]) == without_times(answer)
            assert [chunk["meta_info"]["finish_reason"] is None for chunk in own[:-1]] == [True] * (
                len(own) - 1
            )
            for before, after in pairwise(own):
                assert after["text"].startswith(before["text"])
                count = len(before["output_ids"])
                assert after["output_ids"][:count] == before["output_ids"]
                assert count == before["meta_info"]["completion_tokens"]
                if asked:
                    kept = before["meta_info"]["output_token_logprobs"]
                    assert after["meta_info"]["output_token_logprobs"][:count] == kept

    serve(scenario, says(TEXT, tokens_per_event=tokens_per_event))


@pytest.mark.parametrize("rate", [1, repeated_chunks.RATE])
def test_pieces_of_incremental_streams_are_the_whole_answer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, rate: int
) -> None:
    monkeypatch.setattr(repeated_chunks, "RATE", rate)
    monkeypatch.setattr(repeated_chunks, "FREE_BYTES", 4096)

    async def scenario(server: Any) -> None:
        body = {"text": "abcd", "return_logprob": True, "top_logprobs_num": 3}
        body["sampling_params"] = {"max_new_tokens": 90}
        whole, chunks = await server.generate(**body), await chunks_of(server, body)
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        assert [each for chunk in chunks for each in chunk["output_ids"]] == whole["output_ids"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            joined = [entry for chunk in chunks for entry in chunk["meta_info"][name]]
            assert joined == whole["meta_info"][name]

    serve(scenario, says(TEXT), incremental_streaming_output=True)


def test_the_bytes_of_a_stream_grow_as_its_answer_does(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate is one byte per second, so that a stream's share of it adds nothing."""
    monkeypatch.setattr(repeated_chunks, "RATE", 1)

    async def scenario(server: Any) -> None:
        for num_tokens in (500, 2000):
            body = {"text": "a", "return_logprob": True, "top_logprobs_num": 10, "stream": True}
            body["sampling_params"] = {"max_new_tokens": num_tokens, "ignore_eos": True}
            response = await server.http.post("/generate", json=body)
            last = max(map(len, response.content.split(b"\n\n")))
            assert last > 150 * num_tokens
            assert len(response.content) < 2 * last + 2 * repeated_chunks.FREE_BYTES

    serve(scenario, FakeEngine(context_len=4096))


def test_many_samples_come_while_others_wait(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that ends is shown at once, and takes no other sample's turn with it."""
    monkeypatch.setattr(repeated_chunks, "RATE", 1)
    monkeypatch.setattr(repeated_chunks, "FREE_BYTES", 1)

    async def scenario(server: Any) -> None:
        sampling = [{"max_new_tokens": 5 + index, "ignore_eos": True} for index in range(20)]
        body = {"text": ["a"] * 20, "sampling_params": sampling}
        chunks = await chunks_of(server, body)
        ends = [each["index"] for each in chunks if each["meta_info"]["finish_reason"]]
        assert sorted(ends) == list(range(20))
        assert len(chunks) <= 22

    serve(scenario)


def test_a_client_that_does_not_read_is_left(
    http_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "unread_s", 0.2)
    engine = FakeEngine(context_len=20_000, max_running=4)
    url = httpx.URL(http_url(engine, metrics=MetricsConfig()))
    body = {"text": "a", "return_logprob": True, "top_logprobs_num": 50, "stream": True}
    body["sampling_params"] = {"max_new_tokens": 5000, "ignore_eos": True}
    content = json.dumps(body).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((url.host, url.port))
        head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        metrics = ""
        while not re.search(r"^setpoint:unread_answers_total\S* 1(\.0)?$", metrics, re.M):
            time.sleep(0.05)
            metrics = httpx.get(url.join("/metrics")).text
    assert re.search(r"^setpoint:unread_bytes\S* 0(\.0)?$", metrics, re.M)


def test_a_small_server_says_whom_it_has_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has neither metrics nor an access log."""
    monkeypatch.setattr(Connection, "unread_s", 0.2)
    app = Starlette(routes=[Route("/", lambda request: Response(b"x" * (64 << 20)))])
    server = small_server(app, where="the console's port")

    async def run() -> None:
        with bind_socket("127.0.0.1", 0) as sock:
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            await server.listening.wait()
            with socket.create_connection(sock.getsockname()) as client:
                client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                while not server.server_state.connections:
                    await asyncio.sleep(0.01)
                while server.server_state.connections:
                    await asyncio.sleep(0.01)
            server.end(0.0)
            await serving

    with caplog.at_level("INFO", "setpoint"):
        asyncio.run(run())
    assert "the console's port: closed a connection whose client had not read" in caplog.text
