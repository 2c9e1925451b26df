"""Bytes on the bootstrap port: it has the guards of the main port, and fewer places."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

import httpx
import pytest

from setpoint.core.handshake import new_bytes
from setpoint.frontend.http.connection import Connection
from setpoint.frontend.http.serve import FEW_CONNECTIONS
from setpoint_testing.handovers import HOST, bootstrap_server


def rest_of(sock: socket.socket) -> bytes:
    data = b""
    with suppress(OSError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return bool(sock.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_an_endless_header_is_refused() -> None:
    """Red before: all of it was read and kept, on the loop of the main port."""
    with (
        bootstrap_server(new_bytes()) as port,
        socket.create_connection((HOST, port), timeout=20) as sock,
    ):
        sock.sendall(b"GET /route HTTP/1.1\r\nhost: localhost\r\nx-long: ")
        with suppress(OSError):
            for _ in range(512):
                sock.sendall(b"a" * (1 << 16))
        assert rest_of(sock).startswith(b"HTTP/1.1 431 ")


def test_half_open_connections_are_few_and_keep_nobody_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Red before: all of them stayed."""
    with bootstrap_server(new_bytes()) as port, ExitStack() as stack:
        half_open = []
        for _ in range(2 * FEW_CONNECTIONS):
            sock = stack.enter_context(socket.create_connection((HOST, port), timeout=20))
            sock.sendall(b"GET /route HTTP/1.1\r\nhost: lo")
            half_open.append(sock)
        assert httpx.get(f"http://{HOST}:{port}/health", timeout=20).text == "OK"
        assert sum(map(is_open, half_open)) < FEW_CONNECTIONS
        assert "connections are open at the bootstrap port" in caplog.text


def test_its_end_is_not_that_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """Red before: a prefill server that ended logged ``Shutting down`` twice."""
    with caplog.at_level("INFO"):
        with bootstrap_server(new_bytes()):
            caplog.set_level("INFO", "uvicorn.error")  # as the main port sets it
        assert "Shutting down" not in caplog.text


def test_a_request_that_never_ends_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "receive_s", 0.5)
    with (
        bootstrap_server(new_bytes()) as port,
        socket.create_connection((HOST, port), timeout=20) as sock,
    ):
        sock.sendall(b"GET /route HTTP/1.1\r\nhost: lo")
        assert rest_of(sock).startswith(b"HTTP/1.1 408 ")


def test_a_long_body_is_refused() -> None:
    with bootstrap_server(new_bytes()) as port:
        answer = httpx.post(
            f"http://{HOST}:{port}/query_dp_ranks", content=b" " * (2 << 20), timeout=20
        )
        assert answer.status_code == 413
