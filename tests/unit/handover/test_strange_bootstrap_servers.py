"""Bootstrap servers that clients name: what they are told, and that an odd or slow one ends the
requests that name it, and harms no others. And what a bootstrap server answers to odd questions."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx
import numpy as np
import pytest

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.handover import PromptReceived
from setpoint.core.handshake import new_bytes
from setpoint.core.prefix_digest import prompt_digest
from setpoint.core.request import pack_ids
from setpoint.handover import bootstrap_client, taker
from setpoint_testing.handovers import HOST, bootstrap_server, pair

ROW = np.array([1], np.int32)
WORD = base64.b64encode(b"w" * 32).decode()


@contextmanager
def peer(answer: Callable[[socket.socket, bytes], None]) -> Iterator[tuple[int, list[bytes]]]:
    """A server that answers each connection with a function of its first bytes; its port, and what it
    has received."""
    seen: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked = connection.recv(1 << 16)
            seen.append(asked)
            answer(connection, asked)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server((HOST, 0), backlog=200) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1], seen
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def http(body: str) -> bytes:
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body.encode()


def address(ip: str, port: int = 9) -> str:
    return json.dumps({"rank_ip": ip, "rank_port": port, "pair": WORD, "secret": WORD})


def about_rank(body: str) -> Callable[[socket.socket, bytes], None]:
    def answer(connection: socket.socket, asked: bytes) -> None:
        is_about_all = b"prefill_dp_rank=-1" in asked
        connection.sendall(http('{"dp_size": 1}' if is_about_all else body))

    return answer


def drip(connection: socket.socket, asked: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        time.sleep(0.05)
        connection.sendall(b"a")


ODD = {
    "a long label": about_rank(address("a" * 250)),
    "a very long name": about_rank(address("a" * 5000)),
    "empty labels": about_rank(address("..")),
    "NUL": about_rank(address("a\0b")),
    "no name": about_rank(address("\U0001f600" * 20)),
    "half a character": about_rank(address("\ud800")),
    "nested": about_rank('{"x":' + "[" * 60000),
    "nested at once": lambda connection, asked: connection.sendall(http("[" * 60000)),
    "no JSON": about_rank("hello"),
    "no secret": about_rank(address("127.0.0.1").replace(WORD, "")),
    "not HTTP": lambda connection, asked: connection.sendall(b"\0\xff" * 1000),
    "no status": lambda connection, asked: connection.sendall(b"HTTP/1.1\r\n\r\n"),
    "a long head": lambda connection, asked: connection.sendall(b"HTTP/1.1 200 " + b"a" * 100000),
    "nothing": lambda connection, asked: None,
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_answer_ends_the_transfer_at_once(name: str) -> None:
    with pair() as both, peer(ODD[name]) as (port, _):
        both.taker.fetch(1, Bootstrap(5, HOST, port), new_bytes(), 0, ROW)
        failure = both.taken.wait(PromptReceived, 1, timeout_s=10.0).failure
        assert failure
        assert len(failure) < 1000


@pytest.mark.parametrize("host", ["2.2.2.2 ", "a b", "p\r\nX: y", "p\0", "..", "a" * 100, "\ud800"])
def test_a_host_that_cannot_be_ends_the_transfer_at_once(host: str) -> None:
    with pair() as both:
        both.taker.fetch(1, Bootstrap(5, host, 8998), new_bytes(), 0, ROW)
        assert both.taken.wait(PromptReceived, 1, timeout_s=10.0).failure


def test_slow_bootstrap_servers_hold_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_client, "TIMEOUT_S", 100.0)
    with pair() as both, peer(drip) as (port, seen):
        for number in range(50):
            both.taker.fetch(100 + number, Bootstrap(number, HOST, port), new_bytes(), 0, ROW)
        while not seen:
            time.sleep(0.01)
        assert both.hand_over(1, 5, ROW, ROW).failure == ""
        assert not any(both.taken.of(PromptReceived, 100 + number) for number in range(50))


def test_an_answer_has_a_time_limit_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_client, "TIMEOUT_S", 0.5)
    with pair() as both, peer(drip) as (port, _):
        both.taker.fetch(1, Bootstrap(5, HOST, port), new_bytes(), 0, ROW)
        assert "no answer in 0.5 s" in both.taken.wait(PromptReceived, 1, timeout_s=10.0).failure


def test_engines_that_never_register_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_client, "STARTING_S", 1.0)
    with pair() as both, bootstrap_server(new_bytes()) as port:
        both.taker.fetch(1, Bootstrap(5, HOST, port), new_bytes(), 0, ROW)
        failure = both.taken.wait(PromptReceived, 1, timeout_s=10.0).failure
        assert "have not registered in 1 s" in failure


def test_those_who_wait_for_one_engine_have_one_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the last of them would wait for as many attempts as there are others."""
    monkeypatch.setattr(taker, "GREETING_S", 1.0)
    with (
        socket.create_server((HOST, 0)) as silent,
        pair() as both,
        peer(about_rank(address(HOST, silent.getsockname()[1]))) as (port, seen),
    ):
        for number in range(10):
            both.taker.fetch(number, Bootstrap(number, HOST, port), new_bytes(), 0, ROW)
        for number in range(10):
            assert "no greeting in time" in both.taken.wait(PromptReceived, number).failure
        assert sum(b"prefill_dp_rank=0" in each for each in seen) <= 2


def test_nothing_is_kept_of_servers_that_have_failed() -> None:
    with pair() as both, peer(about_rank(address(HOST, 1))) as (port, seen):
        for number in range(2):
            both.taker.fetch(number, Bootstrap(number, HOST, port), new_bytes(), 0, ROW)
            failure = both.taken.wait(PromptReceived, number).failure
            assert "cannot be reached" in failure
            assert "Errno" not in failure
        about_all = [each for each in seen if b"prefill_dp_rank=-1" in each]
        assert len(about_all) == 2, "it may have another number of engines by then"
        kept = (both.taker._servers, both.taker._connections, both.taker._opening)
        assert not any(kept)


def test_no_bootstrap_server_is_shown_the_api_key() -> None:
    with (
        pair(api_key="a-secret-key", given_api_key="a-secret-key") as both,
        peer(about_rank(address(HOST, 1))) as (port, seen),
    ):
        both.taker.fetch(1, Bootstrap(5, HOST, port), new_bytes(), 0, ROW)
        both.taken.wait(PromptReceived, 1)
        assert seen
        assert not any(b"a-secret-key" in each or b"uthorization" in each for each in seen)


@pytest.mark.parametrize("rank", ["--1", "-", "", "1-", "+1", " 1", "²", "٣", "99999999", "x"])
@pytest.mark.parametrize("name", ["prefill_dp_rank", "target_tp_rank"])
def test_ranks_that_are_no_numbers_are_refused(name: str, rank: str) -> None:
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    with bootstrap_server(new_bytes()) as port:
        answer = httpx.get(
            f"http://{HOST}:{port}/route", params=dict.fromkeys(names, "0") | {name: rank}
        )
        assert answer.status_code == 400
        assert "must be numbers" in answer.text


def test_a_prompt_of_any_namespace_has_a_digest() -> None:
    assert len(prompt_digest(pack_ids(ROW), "\ud800")) == 32
    assert prompt_digest(pack_ids(ROW), "\ud800") != prompt_digest(pack_ids(ROW), "")
