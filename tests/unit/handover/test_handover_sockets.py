"""Transfers between two engines over real sockets: what arrives, what is refused, who is told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.handover import PromptReceived, PromptSent, PromptWanted
from setpoint.core.handshake import new_bytes
from setpoint.handover import giver, segments, taker, taking
from setpoint.handover.channel import SILENCE_S
from setpoint.handover.frames import (
    HEADER,
    MAGIC,
    VERSION,
    Fetch,
    HandoverError,
    decode,
    encode,
    size_of,
)
from setpoint.handover.offers import Offer, Offers
from setpoint_testing.handovers import HOST, handed, identity, pair
from setpoint_testing.server_process import wait_until


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "tcp"])
def test_pages_arrive_where_decode_wants_them(share: bool) -> None:
    with pair(share=share) as both:
        before = both.target.pages.copy()
        arrived = both.hand_over(1, room=77, rows=rows(3, 9, 4), to=rows(20, 6, 21))
        assert arrived.handed == handed()
        assert (arrived.num_rows, arrived.num_bytes) == (3, 3 * 64)
        assert both.given.wait(PromptSent, 1).failure == ""
        assert (both.target.pages[[20, 6, 21]] == both.source.pages[[3, 9, 4]]).all()
        others = np.setdiff1d(np.arange(65), [20, 6, 21])
        assert (both.target.pages[others] == before[others]).all()


@pytest.mark.parametrize("share", [True, False], ids=["shared", "tcp"])
def test_many_chunks_and_transfers_use_the_few_segments_again(
    share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 3 * 64)
    rng = np.random.default_rng(3)
    with pair(share=share, num_pages=400) as both:
        order = rng.permutation(np.arange(1, 401)).astype(np.int32)
        there = rng.permutation(np.arange(1, 401)).astype(np.int32)
        digests = [new_bytes() for _ in range(20)]
        for index, digest in enumerate(digests):
            part = slice(20 * index, 20 * index + 20)
            both.taker.fetch(index, both.bootstrap(100 + index), digest, 0, there[part])
        for index, digest in enumerate(digests):
            both.giver.offer(index, 100 + index, digest)
        for index in range(20):
            both.given.wait(PromptWanted, index)
            both.giver.supply(index, order[20 * index : 20 * index + 20], handed())
        for index in range(20):
            assert both.taken.wait(PromptReceived, index).failure == ""
            assert both.given.wait(PromptSent, index).failure == ""
        assert (both.target.pages[there] == both.source.pages[order]).all()


def test_a_room_that_is_fetched_twice_is_refused_and_harms_nobody() -> None:
    with pair() as both:
        digest = new_bytes()
        both.giver.offer(1, 5, digest)
        both.taker.fetch(1, both.bootstrap(5), digest, 0, rows(1))
        both.given.wait(PromptWanted, 1)
        both.taker.fetch(3, both.bootstrap(5), digest, 0, rows(2))
        assert (
            both.taken.wait(PromptReceived, 3).failure
            == "another transfer of this room is under way"
        )
        both.giver.supply(1, rows(1), handed())
        assert both.taken.wait(PromptReceived, 1).failure == ""
        both.given.wait(PromptSent, 1)
        both.giver.offer(4, 5, digest)  # the room is free again


def test_a_room_with_another_prompt_is_refused_and_stays_open() -> None:
    with pair() as both:
        digest = new_bytes()
        both.giver.offer(1, 5, digest)
        both.taker.fetch(9, both.bootstrap(5), new_bytes(), 0, rows(1))
        assert "another prompt" in both.taken.wait(PromptReceived, 9).failure
        both.taker.fetch(1, both.bootstrap(5), digest, 0, rows(1))
        both.given.wait(PromptWanted, 1)


@pytest.mark.parametrize("when", ["before the fetch", "after it", "while sending"])
def test_an_aborted_prefill_tells_decode_at_once(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 64)
    with pair() as both:
        digest = new_bytes()
        both.giver.offer(1, 5, digest)
        if when == "before the fetch":
            both.giver.withdraw(1, "aborted here")
            both.given.wait(PromptSent, 1)
        both.taker.fetch(1, both.bootstrap(5), digest, 0, np.arange(1, 51, dtype=np.int32))
        if when != "before the fetch":
            both.given.wait(PromptWanted, 1)
            if when == "while sending":
                both.target.before_write = lambda: time.sleep(0.02)
                both.giver.supply(1, np.arange(1, 51, dtype=np.int32), handed())
            both.giver.withdraw(1, "aborted here")
        arrived = both.taken.wait(PromptReceived, 1, timeout_s=5.0)
        assert (arrived.failure, arrived.handed) == ("aborted here", None)
        assert both.given.wait(PromptSent, 1).failure == "aborted here"
        assert len(both.given.of(PromptSent, 1)) == len(both.taken.of(PromptReceived, 1)) == 1
        assert both.hand_over(2, 6, rows(1), rows(2)).failure == ""


def test_a_refusal_that_crosses_with_the_last_word_harms_no_other_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The decode side has taken everything while the prefill side withdraws."""
    monkeypatch.setattr(taker, "MAX_CONNECTIONS", 1)
    with pair() as both:
        digest = new_bytes()
        for number in (1, 2):
            both.giver.offer(number, number, digest)
            both.taker.fetch(number, both.bootstrap(number), digest, 0, rows(number))
            both.given.wait(PromptWanted, number)

        def withdraw_here() -> None:
            time.sleep(0.1)  # until all has been sent
            both.giver.withdraw(1, "aborted here")
            both.given.wait(PromptSent, 1)

        both.target.before_write = withdraw_here  # all was sent, and Taken comes after this
        both.giver.supply(1, rows(1), handed())
        assert both.given.wait(PromptSent, 1).failure == "aborted here"
        arrived = both.taken.wait(PromptReceived, 1)
        both.target.before_write = lambda: None
        both.giver.supply(2, rows(2), handed())
        assert both.taken.wait(PromptReceived, 2).failure == ""
        assert both.given.wait(PromptSent, 2).failure == ""
        assert arrived.failure in ("", "aborted here")


@pytest.mark.parametrize("is_offered", [False, True])
def test_pages_that_were_not_sent_cannot_have_arrived(is_offered: bool) -> None:
    told: list[object] = []
    offers = Offers(told.append, lambda: 0.0)
    receiver = SimpleNamespace(refuse=lambda *_: None, send=lambda *_: None)
    digest = new_bytes()
    if is_offered:
        offers.add(Offer(1, 5, digest))
    offers.fetch(receiver, Fetch(7, 5, digest, 0))
    assert not offers.taken(receiver, 7)
    if is_offered:
        assert told == [PromptWanted(1, 0)]
        offers.supply(1, rows(1), handed())
        assert offers.taken(receiver, 7)
        assert told == [PromptWanted(1, 0), PromptSent(1)]
        assert offers.taken(receiver, 7)  # as after a refusal that crossed with it


def test_nothing_is_written_after_a_cancelled_transfer_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 64)
    with pair() as both:
        digest = new_bytes()
        both.giver.offer(1, 5, digest)
        both.taker.fetch(1, both.bootstrap(5), digest, 0, np.arange(1, 51, dtype=np.int32))
        both.given.wait(PromptWanted, 1)
        both.target.before_write = lambda: time.sleep(0.01)
        both.giver.supply(1, np.arange(1, 51, dtype=np.int32), handed())
        time.sleep(0.05)
        both.taker.cancel(1)
        assert both.taken.wait(PromptReceived, 1).failure == "cancelled"
        both.target.pages[:] = 0  # they belong to somebody else now
        assert "cancelled" in both.given.wait(PromptSent, 1).failure
        assert both.hand_over(2, 6, rows(60), rows(60)).failure == ""
        assert not both.target.pages[:60].any()
        both.taker.cancel(1)  # once more: it has ended
        assert len(both.taken.of(PromptReceived, 1)) == 1


def test_servers_that_differ_are_told_in_what(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: the decode server repeated the prefill server's "here" and "there"; each request
    logged the refusal again."""
    monkeypatch.setattr(giver, "LOG_INTERVAL_S", 0.0)
    with pair(there=identity(weights="others", page_size="16")) as both:
        both.giver.offer(1, 5, new_bytes())
        both.taker.fetch(1, both.bootstrap(5), new_bytes(), 0, rows(1))
        failure = both.taken.wait(PromptReceived, 1).failure
        assert "weights is others on the prefill server and w on the decode server" in failure
        assert "page_size is 16 on the prefill server and 1 on the decode server" in failure
        assert "dtype" not in failure
        both.taker.fetch(2, both.bootstrap(6), new_bytes(), 0, rows(1))
        both.taken.wait(PromptReceived, 2)
        wait_until(lambda: "page_size is 16" in caplog.text)
    assert caplog.text.count("page_size is 16 on the prefill server") == 1


@pytest.mark.parametrize("keys", [("k", "wrong"), ("k", None), (None, "k")])
def test_servers_with_different_api_keys_hand_nothing_over(
    keys: tuple[str | None, str | None],
) -> None:
    with pair(api_key=keys[0], given_api_key=keys[1]) as both:
        both.giver.offer(1, 5, bytes(32))
        both.taker.fetch(1, both.bootstrap(5), bytes(32), 0, rows(1))
        assert "the servers do not know the same key" in both.taken.wait(PromptReceived, 1).failure
        assert not both.given.messages, "nobody has asked for the room"


def test_servers_with_the_same_api_key_hand_over() -> None:
    with pair(api_key="k", given_api_key="k") as both:
        assert both.hand_over(1, 5, rows(1), rows(1)).failure == ""


def test_a_bootstrap_server_that_is_not_there_is_named() -> None:
    with pair() as both:
        both.taker.fetch(1, Bootstrap(5, HOST, 1), new_bytes(), 0, rows(1))
        assert "the bootstrap server at 127.0.0.1:1" in both.taken.wait(PromptReceived, 1).failure


def test_a_damaged_chunk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking.xxhash, "xxh3_64_digest", lambda view: os.urandom(8))
    with pair() as both:
        before = both.target.pages.copy()
        arrived = both.hand_over(1, 5, rows(1), rows(1))
        assert "a chunk's checksum is wrong" in arrived.failure
        assert (both.target.pages == before).all()


STRANGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\0" * 64,
    HEADER.pack(MAGIC, VERSION, 0, 0xFFFFFFFF),
    HEADER.pack(MAGIC, VERSION + 1, 0, 4) + b"\x80\0\0\0",
    HEADER.pack(MAGIC, VERSION, 0, 5) + b"\xc1\0\0\0\0",
    HEADER.pack(MAGIC, VERSION, 0, 1 << 14) + b"\x91" * (1 << 14),
]


@pytest.mark.parametrize("data", STRANGE)
def test_bytes_of_strangers_are_refused(data: bytes) -> None:
    with pair() as both:
        with socket.create_connection((HOST, both.transfer_port), timeout=10.0) as stranger:
            stranger.sendall(data)
            with suppress(ConnectionResetError):  # the end, if not all was read
                while stranger.recv(4096):
                    pass  # the challenge, perhaps a refusal
        assert both.hand_over(1, 5, rows(1), rows(2)).failure == ""


def test_random_bytes_never_reach_the_pool_or_end_the_server() -> None:
    rng = np.random.default_rng(0)
    with pair() as both:
        before = both.source.pages.copy()
        for _ in range(60):
            with socket.create_connection((HOST, both.transfer_port), timeout=10.0) as stranger:
                size = int(rng.integers(0, 300))
                data = rng.bytes(size)
                if rng.random() < 0.5:
                    data = HEADER.pack(MAGIC, VERSION, 0, size) + data
                stranger.sendall(data)
        assert both.hand_over(1, 5, rows(1), rows(2)).failure == ""
        assert (both.source.pages == before).all()


def test_frames_are_checked_before_they_are_read() -> None:
    with pytest.raises(HandoverError, match="not of Setpoint's transfer protocol"):
        size_of(b"x" * HEADER.size, 10)
    with pytest.raises(HandoverError, match="a message of 11 bytes, where at most 10"):
        size_of(HEADER.pack(MAGIC, VERSION, 0, 11), 10)
    message = Fetch(1, 5, new_bytes(), 0)
    data = encode(message)
    assert size_of(data[: HEADER.size], 1000) == len(data) - HEADER.size
    assert decode(data[HEADER.size :]) == message
    for wrong in (b"", b"\xc1", data[HEADER.size : -1], encode(message)[HEADER.size :] + b"x"):
        with pytest.raises(HandoverError, match="malformed"):
            decode(wrong)


PREFILL_ALONE = """
import sys, time
from setpoint_testing.handovers import pair, handed
import numpy as np
from setpoint.core.handover import PromptWanted
with pair(share=sys.argv[1] == "shared", api_key="k") as both:
    both.giver.offer(1, 5, bytes(32))
    print(both.port, flush=True)
    both.given.wait(PromptWanted, 1)
    print("wanted", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["shared", "tcp"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_the_death_of_the_prefill_side_is_noticed(how: str, end: signal.Signals) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", PREFILL_ALONE, how], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        port = int(child.stdout.readline())
        with pair(share=how == "shared", given_api_key="k") as own:
            own.taker.fetch(1, Bootstrap(5, HOST, port), bytes(32), 0, rows(1))
            assert child.stdout.readline() == "wanted\n"
            os.kill(child.pid, end)
            failure = own.taken.wait(PromptReceived, 1).failure
            words = "has closed" if end == signal.SIGKILL else f"silent for {SILENCE_S} s"
            assert words in failure
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
