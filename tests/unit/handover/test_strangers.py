"""What peers without the key learn and can hold up, and what peers with it can say: nothing that
they announce is believed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from setpoint.core.errors import RequestError
from setpoint.core.handover import HandoverState, PromptReceived
from setpoint.core.handshake import new_bytes
from setpoint.core.logprobs import LogprobBlock
from setpoint.core.request import LogprobOptions, Request, RequestOptions, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.handover import announcements
from setpoint.handover.announcements import AnnouncedServers, announced, find
from setpoint.handover.frames import (
    HEADER,
    MAX_WORD,
    Challenge,
    HandoverError,
    Hello,
    SharedSegments,
    Welcome,
    decode,
    encode,
    refusal,
    size_of,
)
from setpoint.handover.giver import MAX_STRANGERS
from setpoint.handover.segments import OwnedShare, machine_name, map_shared
from setpoint.scheduler.handed_checks import what_is_wrong
from setpoint.scheduler.sequence import Sequence
from setpoint_testing.handovers import HOST, identity, pair
from setpoint_testing.server_process import wait_until

ROW = np.array([1], np.int32)
SECRET_FACT = "digest-of-the-weights"


def receive(sock: socket.socket) -> Any:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count and (piece := sock.recv(count - len(data))):
            data += piece
        return data

    header = exactly(HEADER.size)
    return decode(exactly(size_of(header, 1 << 20))) if len(header) == HEADER.size else None


def rest_of(sock: socket.socket) -> bytes:
    data = b""
    with suppress(OSError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def test_a_stranger_at_the_transfer_port_learns_nothing() -> None:
    """Red before: whoever had asked the bootstrap port got a secret that opened the transfer port."""
    with pair(there=identity(weights=SECRET_FACT)) as both:
        with socket.create_connection((HOST, both.transfer_port), timeout=20) as stranger:
            assert isinstance(receive(stranger), Challenge)
            stranger.sendall(encode(Hello(new_bytes(), new_bytes(), False)))
            told = rest_of(stranger)
        assert b"the servers do not know the same key" in told
        assert SECRET_FACT.encode() not in told
        with socket.create_connection((HOST, both.port), timeout=20) as client:
            names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
            query = "&".join(f"{name}=0" for name in names)
            client.sendall(
                f"GET /route?{query} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
            )
            assert b"secret" not in rest_of(client)


def test_a_false_prefill_server_learns_nothing() -> None:
    """Red before: the decode side told its facts before the other side had proved anything."""
    heard: list[bytes] = []
    with socket.create_server((HOST, 0)) as listener, pair() as both:

        def lie() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(20)
                sock.sendall(encode(Challenge(new_bytes())))
                hello = receive(sock)
                heard.append(msgspec.msgpack.encode(hello))
                sock.sendall(encode(Welcome(new_bytes(), identity(), None, False)))
                heard.append(rest_of(sock))

        thread = threading.Thread(target=lie)
        thread.start()
        with pytest.MonkeyPatch.context() as patch:

            async def there(*_: object) -> tuple[str, int]:
                return HOST, listener.getsockname()[1]

            patch.setattr("setpoint.handover.taker.transfer_address", there)
            both.taker.fetch(1, both.bootstrap(5), new_bytes(), 0, ROW)
            failure = both.taken.wait(PromptReceived, 1).failure
        thread.join(20)
    assert "does not know the key" in failure
    assert b"weights" not in b"".join(heard)


def test_without_a_key_in_common_nobody_connects() -> None:
    with pair(key_of=lambda *_: None) as both:
        both.taker.fetch(1, both.bootstrap(5), new_bytes(), 0, ROW)
        assert "have no key in common" in both.taken.wait(PromptReceived, 1).failure


def test_silent_connections_keep_nobody_out() -> None:
    """Red before: 40 of them kept a decode server out for 5 s."""
    with pair() as both, ExitStack() as stack:
        for _ in range(MAX_STRANGERS + 20):
            stack.enter_context(socket.create_connection((HOST, both.transfer_port), timeout=20))
        assert both.hand_over(1, 5, ROW, ROW).failure == ""


def test_a_refusal_of_any_length_can_be_read(caplog: pytest.LogCaptureFixture) -> None:
    """Red before: the decode side called one of more than 4,096 characters malformed."""
    many = {f"fact {number}": "x" * 500 for number in range(60)}
    with pair(there=identity(**many)) as both:
        both.taker.fetch(1, both.bootstrap(5), new_bytes(), 0, ROW)
        failure = both.taken.wait(PromptReceived, 1).failure
        wait_until(lambda: "Refused a connection" in caplog.text)
    assert len(failure) > MAX_WORD
    for text in (failure, caplog.text):
        assert "fact 0 is xxx" in text
        assert "malformed" not in text
    data = encode(refusal("é" * (MAX_WORD + 1)))
    assert len(decode(data[HEADER.size :]).reason) == MAX_WORD  # type: ignore[union-attr]


@pytest.mark.parametrize("what", ["pipe", "file", "other memory", "none"])
def test_only_memory_of_transfers_is_mapped(what: str, tmp_path: Path) -> None:
    """Red before: a pipe stopped the thread of all transfers."""
    if what == "pipe":
        os.mkfifo(tmp_path / "x")
        descriptor = os.open(tmp_path / "x", os.O_RDWR)
    elif what == "file":
        descriptor = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    else:
        descriptor = os.memfd_create("other")
    if what == "none":
        os.close(descriptor)
    found = SharedSegments(machine_name(), os.getpid(), descriptor, new_bytes())
    ends: list[str] = []

    def use() -> None:
        try:
            map_shared(found, 64, 1)
        except HandoverError as error:
            ends.append(str(error))

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(20)
    if what != "none":
        os.close(descriptor)
    assert ends
    assert "the peer's memory" in ends[0]


def test_memory_of_transfers_is_mapped() -> None:
    share = OwnedShare(64, 2)
    share.segments.views[1][:3] = b"abc"
    assert bytes(map_shared(share.invitation, 64, 2).views[1][:3]) == b"abc"
    with pytest.raises(HandoverError, match="another size"):
        map_shared(share.invitation, 64, 3)
    share.close()


# ---------------------------------------------------------------- who is known


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return announcements.folder()


@pytest.mark.parametrize(
    ("host", "names"),
    [
        (HOST, [HOST, "localhost"]),
        ("0.0.0.0", [HOST, "localhost", "127.0.0.7"]),
        ("::1", ["::1", "localhost"]),
    ],
)
def test_a_server_is_known_while_it_lives(own_folder: Path, host: str, names: list[str]) -> None:
    key = new_bytes()
    servers = AnnouncedServers()
    with announced(host, 8998, key):
        for name in names:
            found = find(name, 8998)
            assert found is not None
            assert found.key == key
            assert servers.known(name, 8998) == (HOST if host == "0.0.0.0" else host, 8998)
        for name, port in ((names[0], 8999), ("192.0.2.1", 8998), ("evil", 8998), ("a/b", 8998)):
            with pytest.raises(RequestError, match="no prefill server that this server knows"):
                servers.known(name, port)
    assert find(names[0], 8998) is None
    assert not list(own_folder.iterdir())


def test_what_a_killed_server_has_left_counts_for_nothing(own_folder: Path) -> None:
    with announced(HOST, 8998, new_bytes()):
        (path,) = own_folder.iterdir()
        data = path.read_bytes()
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o644)
        assert find(HOST, 8998) is None, "others may have read the key"
    path.write_bytes(data)
    path.chmod(0o600)
    assert find(HOST, 8998) is None, "nobody holds the lock"
    key = new_bytes()
    with announced(HOST, 8998, key):
        found = find(HOST, 8998)
        assert found is not None
        assert found.key == key


def test_a_start_removes_what_killed_servers_have_left(own_folder: Path) -> None:
    """Red before: such files stayed for ever."""
    with announced(HOST, 8998, new_bytes()), announced(HOST, 8999, new_bytes()):
        living = set(own_folder.iterdir())
        for port in (9000, 9001):
            with announced(HOST, port, new_bytes()):
                (path,) = set(own_folder.iterdir()) - living
                data = path.read_bytes()
            path.write_bytes(data)
        others = [own_folder / "notes.txt", own_folder / ("0" * 32)]
        others[0].write_text("of the user")
        others[1].symlink_to(others[0])
        with announced(HOST, 9002, new_bytes()):
            found = set(own_folder.iterdir())
            assert len(found) == len(living) + len(others) + 1
            assert found > living | set(others)
    assert set(own_folder.iterdir()) == set(others)


def test_a_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "setpoint").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with announced(HOST, 8998, new_bytes()):
        assert find(HOST, 8998) is None
    assert "do not know this server unless they name it" in caplog.text


# ---------------------------------------------------------------- what came with the pages

VOCABULARY = 100


def sequence(**options: Any) -> Sequence:
    request = Request(
        rid="r",
        prompt_ids=pack_ids(np.array([1, 2, 3], np.int32)),
        sampling=SamplingParams(sampling_seed=5, max_new_tokens=4),
        seed=5,
        options=RequestOptions(**options),
    )
    return Sequence(1, request, request.prompt(), 4, frozenset())


GOOD = HandoverState(3, 5, [7], num_cached=2, num_loaded=1)
BLOCK = LogprobBlock([-1.0], [7], [[-1.0, -2.0]], [[7, 8]], [[-3.0]])
ASKED = {"logprobs": LogprobOptions(top=2, ids=(4,))}


def changed(handed: HandoverState, **fields: Any) -> HandoverState:
    return msgspec.structs.replace(handed, **fields)


def block(**fields: Any) -> Callable[[HandoverState], HandoverState]:
    return lambda handed: changed(handed, logprobs=msgspec.structs.replace(BLOCK, **fields))


LIES: dict[str, Callable[[HandoverState], HandoverState]] = {
    "another prompt": lambda handed: changed(handed, num_prompt=4),
    "no token": lambda handed: changed(handed, ids=[]),
    "many tokens": lambda handed: changed(handed, ids=[7] * 64),
    "no such token": lambda handed: changed(handed, ids=[VOCABULARY]),
    "another seed": lambda handed: changed(handed, seed=6),
    "more cached than there are": lambda handed: changed(handed, num_cached=(1 << 31) - 1),
    "more loaded than cached": lambda handed: changed(handed, num_loaded=3),
    "more from memory than loaded": lambda handed: changed(handed, num_from_host=2),
    "no logprobs": lambda handed: changed(handed, logprobs=None),
    "too many logprobs": block(values=[-1.0] * 1000),
    "no values": block(values=[]),
    "of another token": block(ids=[8]),
    "too many likeliest": block(top_values=[[-1.0] * 3], top_ids=[[1, 2, 3]]),
    "uneven": block(top_ids=[[7]]),
    "no such id": block(top_ids=[[7, -1]]),
    "not a number": block(values=[float("nan")]),
    "above 0": block(values=[3.0]),
    "nothing picked": block(picked=[[]]),
    "a fact nobody asked for": lambda handed: changed(handed, token_facts={"x": [b"\0" * 4]}),
}


def test_what_makes_sense_is_taken() -> None:
    assert what_is_wrong(sequence(), GOOD, VOCABULARY) == ""
    with_logprobs = changed(GOOD, logprobs=BLOCK)
    assert what_is_wrong(sequence(**ASKED), with_logprobs, VOCABULARY) == ""
    assert what_is_wrong(sequence(), with_logprobs, VOCABULARY)
    masked = sequence(token_facts=("sampling_mask",))
    facts = {"sampling_mask": [pack_ids(np.array([7, 9], np.int32))]}
    assert what_is_wrong(masked, changed(GOOD, token_facts=facts), VOCABULARY) == ""
    for wrong in ([], [b"\0"], [pack_ids(np.array([-1], np.int32))], [b"\0" * (1 << 20)]):
        lie = changed(GOOD, token_facts={"sampling_mask": wrong})
        assert "impossible facts" in what_is_wrong(masked, lie, VOCABULARY)


def test_an_answer_that_ends_too_early_is_told() -> None:
    """Red before: the decode server ended it, too, below min_new_tokens."""
    request = sequence().request
    sampling = SamplingParams(sampling_seed=5, max_new_tokens=4, min_new_tokens=2)
    asked = msgspec.structs.replace(request, sampling=sampling)
    ending = Sequence(1, asked, asked.prompt(), 4, frozenset({7}))
    assert "before min_new_tokens" in what_is_wrong(ending, GOOD, VOCABULARY)
    assert what_is_wrong(ending, changed(GOOD, ids=[8]), VOCABULARY) == ""


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_told(name: str) -> None:
    """Red before: status 500 with a traceback, or 2,147,483,647 cached tokens in the answer."""
    lie = LIES[name](changed(GOOD, logprobs=BLOCK))
    assert "prefill server" in what_is_wrong(sequence(**ASKED), lie, VOCABULARY)
