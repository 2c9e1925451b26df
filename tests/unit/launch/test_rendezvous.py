"""Ranks of several nodes meet: what both sides must know and agree about, and what they say if they
do not."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest

from setpoint.launch.child import rendezvous as module
from setpoint.launch.child.rendezvous import (
    Rendezvous,
    RendezvousFailed,
    join,
    own_host,
    peer,
    watch,
)
from setpoint_testing.server_process import free_port, wait_until

AGREED = {"the version of Setpoint": "1", "--dtype": "bfloat16"}
NODES = {1: 1, 2: 1, 3: 2}


@contextmanager
def meeting(**changes: object) -> Iterator[tuple[Rendezvous, tuple[str, int]]]:
    address = ("127.0.0.1", free_port())
    options = {"facts": AGREED, "seed": 17, "secret": "known"} | changes
    met = Rendezvous(address, options.pop("nodes", NODES), **options)  # type: ignore[arg-type]
    try:
        yield met, address
    finally:
        met.close()


def joined(address: tuple[str, int], rank: int, **changes: object) -> tuple[Connection, int]:
    options = {"node": NODES.get(rank, 1), "facts": AGREED, "secret": "known", "timeout_s": 20}
    return join(address, rank=rank, **options | changes)  # type: ignore[arg-type]


def test_links_come_in_the_order_of_ranks() -> None:
    with meeting() as (met, address):
        theirs = {rank: joined(address, rank) for rank in (3, 1, 2)}
        ours = met.wait(20)
        for rank, link in enumerate(ours, 1):
            link.send_bytes(b"%d" % rank)
        assert {rank: link.recv_bytes() for rank, (link, _) in theirs.items()} == {
            1: b"1",
            2: b"2",
            3: b"3",
        }
        assert {seed for _, seed in theirs.values()} == {17}
        assert own_host(ours[0]) == peer(theirs[1][0]) == "127.0.0.1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"facts": AGREED | {"--dtype": "float32"}},
            "--dtype is float32 there and bfloat16 on node 0",
        ),
        (
            {"facts": {"the version of Setpoint": "2", "--dtype": "bfloat16", "--new": "x"}},
            "--new is x there and unknown on node 0; the version of Setpoint is 2 there and 1",
        ),
        ({"secret": "another"}, "it has another --dist-secret than node 0"),
        ({"secret": None}, "it has another --dist-secret than node 0"),
        ({"rank": 7}, r"there is no rank 7 \(node 1\) here"),
        ({"node": 2}, r"there is no rank 1 \(node 2\) here"),
    ],
)
def test_both_sides_hear_why_a_rank_is_refused(
    changes: dict, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with meeting() as (met, address):
        with pytest.raises(RendezvousFailed, match=words):
            joined(address, **{"rank": 1} | changes)
        with pytest.raises(
            RendezvousFailed, match=r"Rank 1 \(node 1\), .* and rank 3 \(node 2\) did not"
        ):
            met.wait(0.1)
    assert any(record.levelname == "WARNING" for record in caplog.records)


def test_whoever_waits_in_vain_hears_who_was_refused() -> None:
    with meeting() as (met, address):
        with pytest.raises(RendezvousFailed):
            joined(address, 1, facts={})
        joined(address, 2), joined(address, 3)
        with pytest.raises(
            RendezvousFailed, match=r"^Rank 1 \(node 1\) did not join .* within 0.1 s.*"
        ) as no:
            met.wait(0.1)
        assert "rank 1 (node 1), from 127.0.0.1, was refused: --dtype is unknown there" in str(
            no.value
        )


def test_a_rank_that_is_started_twice() -> None:
    with meeting() as (met, address):
        for rank in NODES:
            joined(address, rank)
        met.wait(20)
        with pytest.raises(
            RendezvousFailed, match=r"rank 2 \(node 1\) has joined already, from 127"
        ):
            joined(address, 2)


def test_an_impostor_of_node_0_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    with meeting(secret="known") as (_, address):
        monkeypatch.setattr(Rendezvous, "_why_not", lambda *_: "")
        with pytest.raises(RendezvousFailed, match="does not know --dist-secret"):
            joined(address, 1, secret="another")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x05hello",
        struct.pack("!i", 1 << 30),
        struct.pack("!iQ", -1, 1 << 40),
        b"",
        struct.pack("!i", 2) + b"\x80\x04",  # the beginning of a pickle
    ],
)
def test_bytes_of_a_stranger_are_refused(
    data: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 1)
    with meeting() as (met, address):
        with socket.create_connection(address) as stranger:
            stranger.settimeout(20)
            stranger.sendall(data)
            with suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass  # the challenge, then the end
        wait_until(lambda: "is not a rank of Setpoint" in caplog.text)
        for rank in NODES:
            joined(address, rank)
        assert len(met.wait(20)) == 3


def test_strangers_who_say_nothing_do_not_keep_ranks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HANDSHAKES", 4)
    monkeypatch.setattr(module, "HANDSHAKE_S", 1)
    with meeting(nodes={1: 1}) as (met, address):
        silent = [socket.create_connection(address) for _ in range(12)]
        wait_until(lambda: _joins(address))
        assert len(met.wait(20)) == 1
        for each in silent:
            each.close()


def _joins(address: tuple[str, int]) -> bool:
    try:
        joined(address, 1)
    except RendezvousFailed:
        return False
    return True


def test_an_address_in_use() -> None:
    with (
        meeting() as (_, address),
        pytest.raises(
            RendezvousFailed, match=rf"--dist-init-addr 127.0.0.1:{address[1]}: another program"
        ),
    ):
        Rendezvous(address, NODES, facts=AGREED, seed=0, secret="known")


def test_an_address_of_another_machine() -> None:
    with pytest.raises(
        RendezvousFailed, match=r"192\.0\.2\.1:5000: it is not an address of this machine"
    ):
        Rendezvous(("192.0.2.1", 5000), NODES, facts=AGREED, seed=0, secret="known")


def test_nobody_listens() -> None:
    port = free_port()
    with pytest.raises(
        RendezvousFailed,
        match=rf"127.0.0.1:{port} within 1 s \(--dist-timeout\): Connection refused",
    ):
        joined(("127.0.0.1", port), 1, timeout_s=1)


def test_node_0_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    address, found = ("127.0.0.1", free_port()), []
    connect, refused = socket.create_connection, threading.Event()

    def knock(*args: Any, **options: Any) -> socket.socket:
        try:
            return connect(*args, **options)
        except ConnectionRefusedError:
            refused.set()
            raise

    monkeypatch.setattr(socket, "create_connection", knock)
    thread = threading.Thread(target=lambda: found.append(joined(address, 1)))
    thread.start()
    assert refused.wait(20)
    met = Rendezvous(address, {1: 1}, facts=AGREED, seed=0, secret="known")
    assert len(met.wait(20)) == 1
    thread.join(20)
    met.close()
    assert found


def test_what_listens_there_is_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"220 mail ESMTP\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(RendezvousFailed, match="is not node 0 of Setpoint"):
            joined(address, 1)


def test_a_lost_link_is_noticed_at_both_ends() -> None:
    with meeting(nodes={1: 1}) as (met, address):
        link, _ = joined(address, 1)
        (ours,) = met.wait(20)
        heard: list[str] = []
        watch(ours, heard.append)
        assert not heard
        link.close()
        wait_until(lambda: heard == ["its process has ended"])
    with meeting(nodes={1: 1}) as (met, address):
        link, _ = joined(address, 1)
        met.wait(20)
        watch(link, heard.append)
        met.close()
        wait_until(lambda: len(heard) == 2)
        with pytest.raises(EOFError):
            link.recv_bytes()


def test_a_client_that_sends_a_byte_now_and_then_keeps_no_rank_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red before: it kept its place for ever, and a rank that found no place gave up at once."""
    monkeypatch.setattr(module, "HANDSHAKE_S", 2.0)
    monkeypatch.setattr(module, "MAX_HANDSHAKES", 1)
    is_over = threading.Event()

    def dribble() -> None:
        with suppress(OSError):
            sock.sendall(struct.pack("!i", 60000))
            while not is_over.wait(0.2):
                sock.sendall(b"x")

    with meeting() as (_, address), socket.create_connection(address) as sock:
        sock.recv(4)  # it has the only place
        thread = threading.Thread(target=dribble)
        thread.start()
        joined(address, 1)
        is_over.set()
        thread.join()
