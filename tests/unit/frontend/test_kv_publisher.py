"""KV events over ZeroMQ, as a subscriber gets them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import zmq

from setpoint.core.errors import ConfigError
from setpoint.core.kv_events import BlockRemoved, BlockStored, PublisherConfig
from setpoint.frontend.telemetry import kv_publisher
from setpoint.frontend.telemetry.kv_publisher import KVPublisher
from setpoint_testing.kv_subscriber import BATCH
from setpoint_testing.server_process import free_ports

WAIT_MS = 60_000
Connect = Callable[..., zmq.Socket[bytes]]
END = b"\xff" * 8


def events_of(number: int) -> bytes:
    stored = BlockStored([number], None, [number, number + 1], 2)
    return msgspec.msgpack.encode([stored, BlockRemoved([number])])


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes sockets that are connected to a port of this machine."""
    with zmq.Context() as context:
        sockets = []

        def make(kind: int, port: int, **options: int) -> zmq.Socket[bytes]:
            sockets.append(context.socket(kind))
            for name, value in options.items():
                sockets[-1].setsockopt(getattr(zmq, name), value)
            if kind == zmq.SUB:
                sockets[-1].setsockopt(zmq.SUBSCRIBE, b"kv")
            sockets[-1].connect(f"tcp://127.0.0.1:{port}")
            return sockets[-1]

        yield make
        for each in sockets:
            each.close(linger=0)


@pytest.fixture
def base() -> int:
    """The first of two free ports."""
    return free_ports(2)


def config_of(base: int, **keys: Any) -> PublisherConfig:
    return PublisherConfig(
        publisher="zmq", endpoint=f"tcp://127.0.0.1:{base}", bind=True, topic="kv", **keys
    )


def until_it_hears(subscriber: zmq.Socket[bytes], publisher: KVPublisher, rank: int = 0) -> None:
    while not subscriber.poll(10):
        publisher.take(rank, events_of(7))


def test_a_batch_has_topic_number_time_events_and_rank(connect: Connect, base: int) -> None:
    with KVPublisher(config_of(base), 2) as publisher:
        subscriber = connect(zmq.SUB, base + 1)
        until_it_hears(subscriber, publisher, rank=1)
        numbers = []
        publisher.cleared(1)
        while True:
            assert subscriber.poll(WAIT_MS)
            topic, number, payload = subscriber.recv_multipart()
            batch = BATCH.decode(payload)
            numbers.append(int.from_bytes(number, "big"))
            assert (topic, len(number), batch.attn_dp_rank) == (b"kv", 8, 1)
            assert batch.ts > 1.7e9
            if len(batch.events) == 1:
                break
            stored, removed = batch.events
            assert stored.token_ids == [7, 8]
            assert (stored.block_size, stored.medium, removed.medium) == (2, "GPU", "GPU")
        assert type(batch.events[0]).__name__ == "AllBlocksCleared"
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert publisher.num_published == numbers[-1] + 1
        assert publisher.num_overruns == 0
        raw = msgspec.msgpack.decode(payload)
        assert raw[1:] == [[{"type": "AllBlocksCleared"}], 1]


def test_a_slow_subscriber_loses_batches_and_no_other_does(connect: Connect, base: int) -> None:
    """The numbers of what it gets have a gap, and that it fell behind is counted."""
    big = msgspec.msgpack.encode([BlockStored([0], None, [2**31] * 20_000, 20_000)])
    with KVPublisher(config_of(base, hwm=100), 1) as publisher:
        slow = connect(zmq.SUB, base, RCVHWM=1, RCVBUF=4096)
        until_it_hears(slow, publisher)
        fast = connect(zmq.SUB, base, RCVHWM=0)
        until_it_hears(fast, publisher)
        got = [int.from_bytes(fast.recv_multipart()[1], "big")]
        num_missed = 0
        while num_missed < 5:
            publisher.take(0, big)
            num_missed += publisher.num_overruns
            while got[-1] < publisher.num_published - 1:
                assert fast.poll(WAIT_MS)
                got.append(int.from_bytes(fast.recv_multipart()[1], "big"))
        assert got == list(range(got[0], publisher.num_published))
        assert publisher.num_overruns >= 1
        last = publisher.num_published
        numbers = [-1]
        while numbers[-1] < last:
            publisher.take(0, events_of(0))
            while slow.poll(10):
                numbers.append(int.from_bytes(slow.recv_multipart()[1], "big"))
        gaps = [late - early for early, late in pairwise(numbers[1:])]
        assert max(gaps) > 1


def test_what_was_missed_is_sent_again(connect: Connect, base: int) -> None:
    config = config_of(base, replay_endpoint=f"tcp://127.0.0.1:{base + 1}", buffer_steps=5)
    with KVPublisher(config, 1) as publisher:
        for number in range(8):
            publisher.take(0, events_of(number))
        dealer = connect(zmq.DEALER, base + 1)
        for first, expected in ((5, [5, 6, 7]), (0, [3, 4, 5, 6, 7]), (8, [])):
            dealer.send_multipart((b"", first.to_bytes(8, "big")))
            got = []
            while True:
                assert dealer.poll(WAIT_MS)
                empty, topic, number, payload = dealer.recv_multipart()
                assert empty == b""
                if number == END:
                    assert (topic, payload) == (b"", b"")
                    break
                assert topic == b"kv"
                got.append(int.from_bytes(number, "big"))
                assert BATCH.decode(payload).events[0].block_hashes == [got[-1]]
            assert got == expected


def test_requests_that_are_none_are_ignored(
    connect: Connect, base: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(base, replay_endpoint=f"tcp://127.0.0.1:{base + 1}")
    with KVPublisher(config, 1) as publisher:
        publisher.take(0, events_of(1))
        dealer = connect(zmq.DEALER, base + 1)
        for frames in ((b"",), (b"", b"first"), (b"", b"", b""), (b"", bytes(8))):
            dealer.send_multipart(frames)
        assert dealer.poll(WAIT_MS)
        assert dealer.recv_multipart()[2] == bytes(8)
    assert caplog.text.count("is not a sequence number") == 3


def test_what_is_kept_for_replay_has_a_size(base: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "MAX_REPLAY_BYTES", 1000)
    config = config_of(base, replay_endpoint=f"tcp://127.0.0.1:{base + 1}")
    with KVPublisher(config, 1) as publisher:
        for number in range(100):
            publisher.take(0, events_of(number))
        (rank,) = publisher._ranks
        assert rank.num_kept_bytes == sum(len(payload) for _, payload in rank.kept) <= 1000
        assert rank.kept[-1][0] == 99


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_a_port_in_use_is_named(base: int, key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = msgspec.structs.replace(config_of(base), **{key: address})
        with pytest.raises(ConfigError, match=rf"{key} cannot bind to {address}: address.* in use"):
            KVPublisher(config, 1)


def test_an_end_does_not_wait_for_a_subscriber_that_is_gone(base: int) -> None:
    config = PublisherConfig(publisher="zmq", endpoint=f"tcp://127.0.0.1:{base}")  # connects
    with KVPublisher(config, 1) as publisher:
        for number in range(1000):
            publisher.take(0, events_of(number))
