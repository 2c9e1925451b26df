"""Many clients connect and ask at once: who is answered in which order."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from setpoint.core.request import Ids
from setpoint.frontend.http.pace import PER_TURN, TurnLimiter, Urgency
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.ipc.client import EngineClient
from setpoint_testing.fake_engine import FakeEngine

Url = Callable[..., str]
N = 40 * PER_TURN
PATIENCE_S = 120.0


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 80), timeout=PATIENCE_S)


def asking(method: str, path: str, body: object = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


GENERATE = asking("POST", "/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 1}})


def answer_of(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(1 << 16):
        data += piece
    return data


class Held:
    """The first prompt is held until ``go`` is set; ``num_prompts`` were tokenized so far."""

    def __init__(self) -> None:
        self.num_prompts = 0
        self.reached, self.go = threading.Event(), threading.Event()

    def encode(self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> Ids:
        self.num_prompts += 1
        self.reached.set()
        assert self.go.wait(PATIENCE_S)
        return np.array(list(text.encode()), np.int32)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held()
    monkeypatch.setattr(
        Tokenizer,
        "encode",
        lambda tokenizer, *args, **kinds: held.encode(tokenizer, *args, **kinds),
    )
    return held


@contextmanager
def burst(url: str, held: Held, *, late: bytes) -> Iterator[list[socket.socket]]:
    """N prompts on N connections, and then ``late`` on a new one, all while the first prompt keeps
    the server's loop busy. Yields the sockets, the late one last."""
    with ExitStack() as stack:
        first = stack.enter_context(connect(url))
        first.sendall(GENERATE)
        assert held.reached.wait(PATIENCE_S)
        sockets = [first]
        for request in (*[GENERATE] * (N - 1), late):
            sockets.append(stack.enter_context(connect(url)))
            sockets[-1].sendall(request)
        held.go.set()
        yield sockets


@pytest.mark.parametrize(
    "late", [asking("GET", "/ready"), asking("POST", "/abort_request", {"rid": "nobody"})]
)
def test_probes_and_controls_overtake_a_burst(
    http_url: Url, held: Held, monkeypatch: pytest.MonkeyPatch, late: bytes
) -> None:
    """Red before: one connection was accepted in each turn of the loop, so that a new one waited
    until every prompt before it had been prepared."""
    prepared_before: list[int] = []
    is_ready, abort = EngineClient.is_ready.fget, EngineClient.abort
    assert is_ready is not None

    def ready(client: EngineClient) -> bool:
        prepared_before.append(held.num_prompts)
        return is_ready(client)

    def aborting(client: EngineClient, rid: str = "", *, abort_all: bool = False) -> None:
        prepared_before.append(held.num_prompts)
        abort(client, rid, abort_all=abort_all)

    monkeypatch.setattr(EngineClient, "is_ready", property(ready))
    monkeypatch.setattr(EngineClient, "abort", aborting)
    with burst(http_url(FakeEngine()), held, late=late) as sockets:
        assert answer_of(sockets[-1]).startswith(b"HTTP/1.1 200 ")
        (num_prepared,) = prepared_before
        assert num_prepared <= 4 * PER_TURN
        for sock in sockets[:-1]:
            assert answer_of(sock).startswith(b"HTTP/1.1 200 ")
    assert held.num_prompts == N


def test_a_burst_is_served_in_the_order_of_its_connections(http_url: Url, held: Held) -> None:
    """A few prompts in each turn, and nobody is overtaken by more than those of one turn."""
    engine = FakeEngine()
    last = asking("POST", "/generate", {"text": "z", "sampling_params": {"max_new_tokens": 1}})
    with burst(http_url(engine), held, late=last) as sockets:
        for sock in sockets:
            assert answer_of(sock).startswith(b"HTTP/1.1 200 ")
    place = [request.prompt().tolist() for request in engine.submitted].index([ord("z")])
    assert place >= N - PER_TURN


def test_the_wait_for_a_turn_is_part_of_the_latency(
    http_url: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: the latency began when the body was read, after any wait."""

    def late(pace: TurnLimiter, function: Callable[[], object], rank: Urgency) -> None:
        asyncio.get_running_loop().call_later(0.2, function)

    monkeypatch.setattr(TurnLimiter, "call", late)
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 1}}
    with httpx.Client(timeout=PATIENCE_S) as client:
        answer = client.post(f"{http_url(FakeEngine())}/generate", json=body).json()
    assert answer["meta_info"]["e2e_latency"] > 0.15
