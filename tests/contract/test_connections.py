"""Bytes on a connection: endless and slow requests end, HTTP/1.0 gets no chunks, refusals of long
bodies are read, an end is quiet."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest

from setpoint.frontend.http.connection import MAX_HEAD_BYTES, Connection
from setpoint_testing.fake_engine import FakeEngine
from setpoint_testing.server_process import PATIENCE_S

Url = Callable[..., str]
JSON = {"content-type": "application/json"}


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 80), timeout=10)


def read_all(sock: socket.socket) -> bytes:
    """What comes until the server closes."""
    data = b""
    while piece := sock.recv(1 << 16):
        data += piece
    return data


def send_all_of(sock: socket.socket, piece: bytes, total: int) -> None:
    """``piece`` again and again; a server that closes early is no failure of this test."""
    try:
        for _ in range(total // len(piece)):
            sock.sendall(piece)
    except OSError:
        pass


def message_of(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"])


def head_of(length: int, *, version: str = "1.1", more: str = "", path: str = "/generate") -> bytes:
    lines = (
        f"POST {path} HTTP/{version}",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {length}",
    )
    return ("\r\n".join(lines) + f"\r\n{more}\r\n").encode()


def post(body: bytes, *, version: str = "1.1", more: str = "", path: str = "/generate") -> bytes:
    return head_of(len(body), version=version, more=more, path=path) + body


def test_an_http_1_0_client_gets_no_chunks(http_url: Url) -> None:
    url = http_url(FakeEngine())
    body = json.dumps(
        {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 3}}
    ).encode()
    with connect(url) as sock:
        sock.sendall(post(body, version="1.0", more="connection: keep-alive\r\n"))
        head, _, events = read_all(sock).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    *lines, last = events.decode().strip().split("\n\n")
    assert (json.loads(lines[-1].removeprefix("data: "))["text"], last) == ("abc", "data: [DONE]")
    with connect(url) as sock:
        sock.sendall(post(body.replace(b"true", b"false"), version="1.0"))
        head, _, whole = read_all(sock).partition(b"\r\n\r\n")
    assert b"content-length" in head.lower()
    assert json.loads(whole)["text"] == "abc"


def test_a_head_of_megabytes_is_refused(http_url: Url) -> None:
    with connect(http_url(FakeEngine())) as sock:
        sock.sendall(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nx-long: ")
        send_all_of(sock, b"a" * (1 << 16), 50 << 20)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert str(MAX_HEAD_BYTES) in message_of(answer)


def test_a_long_head_within_the_limit_is_read(http_url: Url) -> None:
    with httpx.Client(timeout=PATIENCE_S) as client:
        assert (
            client.get(
                f"{http_url(FakeEngine())}/ready", headers={"x-long": "a" * (MAX_HEAD_BYTES - 1000)}
            ).status_code
            == 200
        )


@pytest.mark.parametrize("num_bytes", [MAX_HEAD_BYTES + 1, 120_000])
@pytest.mark.parametrize("before", [b"", b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n"])
def test_a_head_that_arrives_in_one_piece_has_the_same_limit(
    http_url: Url, num_bytes: int, before: bytes
) -> None:
    """Red before: it could have twice as many bytes."""
    with connect(http_url(FakeEngine())) as sock:
        head = b"GET /ready HTTP/1.1\r\nhost: localhost\r\nx-long: "
        padding = b"a" * (num_bytes - len(head) - 4)
        if before:
            sock.sendall(before)
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        sock.sendall(head + padding + b"\r\n\r\n")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert str(MAX_HEAD_BYTES) in message_of(answer)


def test_a_long_body_is_refused_before_it_is_sent(http_url: Url) -> None:
    """Red before: "100 Continue", and then the refusal."""
    with connect(http_url(FakeEngine())) as sock:
        sock.sendall(head_of(1 << 40, more="expect: 100-continue\r\nconnection: close\r\n"))
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
    with connect(http_url(FakeEngine())) as sock:
        sock.sendall(head_of(100, more="expect: 100-continue\r\n"))
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 100 ")


def test_slow_requests_end(http_url: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stops in its head, one that stops in its body, one that trickles, one that never
    begins."""
    monkeypatch.setattr(Connection, "receive_s", 2.0)
    url = http_url(FakeEngine())
    started = time.monotonic()
    with (
        connect(url) as head,
        connect(url) as body,
        connect(url) as silent,
        connect(url) as trickle,
    ):
        head.sendall(b"GET /ready HTTP/1.1\r\nhost: localh")
        body.sendall(post(b"{" + b" " * 100)[:-50])
        trickle.sendall(b"GET /ready HTTP/1.1\r\nx: ")
        for _ in range(4):
            time.sleep(0.05)
            trickle.sendall(b"a")
        for sock in (head, body, trickle):
            answer = read_all(sock)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert "did not arrive within 2 s" in message_of(answer)
        assert read_all(silent) == b""
    assert time.monotonic() - started >= 2.0, "nobody is cut off before the time is over"


def test_a_slow_answer_is_waited_for(http_url: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is for requests alone."""
    monkeypatch.setattr(Connection, "receive_s", 0.1)
    url = http_url(FakeEngine(step_s=0.1))
    with connect(url) as sock:
        sock.sendall(
            post(
                b'{"text": "abc", "sampling_params": {"max_new_tokens": 5}}',
                more="connection: close\r\n",
            )
        )
        assert read_all(sock).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("more", ["", "connection: close\r\n"])
@pytest.mark.parametrize(("path", "status"), [("/generate", 413), ("/nothing", 404)])
def test_a_body_that_is_much_too_long_gets_its_answer(
    http_url: Url, path: str, status: int, more: str
) -> None:
    """Clients send all of it before they look for an answer; a connection closed meanwhile would be
    reset."""
    size = 100 << 20
    with connect(http_url(FakeEngine())) as sock:
        sock.sendall(head_of(size, path=path, more=more))
        for _ in range(size >> 20):
            sock.sendall(b" " * (1 << 20))
        assert sock.recv(1 << 16).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_connection_goes_on_after_a_body_that_was_not_read(http_url: Url) -> None:
    url = http_url(FakeEngine())
    with httpx.Client(timeout=PATIENCE_S) as client:
        ports = [
            client.post(f"{url}/nothing", content=b" " * (1 << 20), headers=JSON).extensions[
                "network_stream"
            ]
            for _ in range(2)
        ]
        assert len({stream.get_extra_info("client_addr") for stream in ports}) == 1


def test_what_is_no_http_is_told_so(http_url: Url) -> None:
    with connect(http_url(FakeEngine())) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert message_of(answer) == "The request is not valid HTTP."


def test_connections_that_ask_nothing_keep_nobody_out(
    http_url: Url, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream that began before them goes on. Red before: they were as many as the system allows,
    and then nobody could connect for 20 s."""
    monkeypatch.setattr("setpoint.frontend.http.serve.most_for_clients", lambda: 8)
    url = http_url(FakeEngine(step_s=0.05))
    body = json.dumps(
        {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 8}}
    ).encode()
    with ExitStack() as stack:
        stream = stack.enter_context(connect(url))
        stream.sendall(post(body, more="connection: close\r\n"))
        began = stream.recv(1 << 16)
        for _ in range(40):
            stack.enter_context(connect(url)).sendall(b"GET /ready HTTP/1.1\r\nhost: lo")
        assert httpx.get(f"{url}/ready", timeout=PATIENCE_S).status_code == 200
        assert b"data: [DONE]" in began + read_all(stream)
    assert "More than 8 connections are open at the port" in caplog.text
