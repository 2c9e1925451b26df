"""Binding, and the application under a real uvicorn: bytes on a TCP connection, and connections
that close."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from setpoint.core.errors import ConfigError
from setpoint.frontend.apis.dialects import DIALECTS
from setpoint.frontend.composition import compose
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.http.app import create_app
from setpoint.frontend.http.port import bind_socket
from setpoint.frontend.http.serve import make_server
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine
from setpoint_testing.byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from setpoint_testing.fake_engine import FakeEngine, FixedOptions


def test_a_taken_port_is_one_clear_error() -> None:
    with bind_socket("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Cannot listen on 127.0.0.1:{port}: .*--port"):
            bind_socket("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host"):
        bind_socket("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match="--host"):
        bind_socket("203.0.113.1", 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_frees_the_sequence(stream: bool) -> None:
    engine = FakeEngine(script=lambda request: [120], step_s=0.002, context_len=100_000)
    config = FrontendConfig(
        model_path="m",
        served_model_name="m",
        tokenizer_path="m",
        context_len=100_000,
        max_req_input_len=90_000,
        vocab_size=VOCAB_SIZE,
    )
    service = compose(
        config, EngineClient(), TextProcessor(Tokenizer(make_byte_tokenizer())), FixedOptions()
    )

    async def scenario(sock: socket.socket) -> None:
        service.engine.attach(EngineLine(engine))
        server = make_server(create_app(service, DIALECTS), log_level="warning")
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        body = json.dumps(
            {"text": "a", "stream": stream, "sampling_params": {"max_new_tokens": 50_000}}
        ).encode()
        head = (
            "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type:"
            f" application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        while not engine.running:
            await asyncio.sleep(0.01)
        if stream:
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(
                b"HTTP/1.1 200 OK"
            )
        writer.close()
        await writer.wait_closed()
        for _ in range(200):
            if engine.stopped:
                break
            await asyncio.sleep(0.01)
        assert engine.stopped == [engine.submitted[0].rid]
        assert not engine.running
        server.end(1.0)
        await asyncio.wait_for(serving, 10)

    sock = bind_socket("127.0.0.1", 0)
    asyncio.run(scenario(sock))


def test_an_end_in_the_middle_of_requests_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A half-sent head, a half-sent body, and a stream that goes on for longer than the drain: none
    of them logs an error."""
    engine = FakeEngine(script=lambda request: [120], step_s=0.01, context_len=100_000)
    config = FrontendConfig(
        model_path="m",
        served_model_name="m",
        tokenizer_path="m",
        context_len=100_000,
        max_req_input_len=90_000,
        vocab_size=VOCAB_SIZE,
    )
    service = compose(
        config, EngineClient(), TextProcessor(Tokenizer(make_byte_tokenizer())), FixedOptions()
    )

    async def scenario(sock: socket.socket) -> None:
        service.engine.attach(EngineLine(engine))
        server = make_server(create_app(service, DIALECTS))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        address = sock.getsockname()
        body = json.dumps(
            {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 50_000}}
        ).encode()
        head = (
            "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type:"
            f" application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        writers = []
        for sent in (head[:30], head + body[:10], head + body):
            _, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            writers.append(writer)
        while not engine.running:
            await asyncio.sleep(0.01)
        server.end(1.0)
        await asyncio.wait_for(serving, 5)
        assert not engine.running
        for writer in writers:
            writer.close()

    asyncio.run(scenario(bind_socket("127.0.0.1", 0)))
    assert not [
        record
        for record in caplog.records
        if record.levelname in ("ERROR", "CRITICAL") or record.exc_info
    ]
