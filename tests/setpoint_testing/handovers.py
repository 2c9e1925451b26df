"""Both sides of transfers in one process, over real sockets, with pools that are arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.handover import HandoverState, PromptReceived, PromptSent, PromptWanted
from setpoint.core.handshake import key_for, new_bytes
from setpoint.core.request import Ids
from setpoint.frontend.http.port import bind_socket
from setpoint.handover.bootstrap_client import register
from setpoint.handover.bootstrap_server import BootstrapServer, ServerFacts
from setpoint.handover.giver import RoomGiver, listening
from setpoint.handover.giving import Terms
from setpoint.handover.identity import Identity
from setpoint.handover.mover_thread import MoverThread
from setpoint.handover.taker import RoomTaker
from setpoint.handover.taking import Wants
from setpoint.launch.parent.bootstrapping import answering

Found = TypeVar("Found", PromptWanted, PromptSent, PromptReceived)
HOST = "127.0.0.1"


def identity(**changed: str) -> Identity:
    return Identity({"weights": "w", "page_size": "1", "dtype": "bfloat16", **changed})


class ArrayPool:
    """A ``core.handover.PageStore`` of one cache group."""

    width = 1

    def __init__(self, num_pages: int, row_bytes: int, seed: int = 0) -> None:
        self.row_bytes = row_bytes
        self.pages = np.random.default_rng(seed).integers(
            0, 256, (num_pages + 1, row_bytes), np.uint8
        )
        self.before_write: Callable[[], None] = lambda: None

    def read_into(self, rows: Ids, out: memoryview) -> None:
        view = np.frombuffer(out, np.uint8).reshape(len(rows), self.row_bytes)
        np.take(self.pages, rows, axis=0, out=view)

    def write_from(self, rows: Ids, data: memoryview) -> None:
        self.before_write()
        self.pages[rows] = np.frombuffer(data, np.uint8).reshape(len(rows), self.row_bytes)


@dataclass(slots=True)
class Posted:
    """The inbox of a loop that a test reads."""

    messages: list[PromptWanted | PromptSent | PromptReceived] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def post(self, message: PromptWanted | PromptSent | PromptReceived) -> None:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    def of(self, kind: type[Found], seq_id: int) -> list[Found]:
        return [each for each in self.messages if isinstance(each, kind) and each.seq_id == seq_id]

    def wait(self, kind: type[Found], seq_id: int, timeout_s: float = 20.0) -> Found:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.of(kind, seq_id)), timeout_s), (
                f"no {kind.__name__} of {seq_id} among {self.messages}"
            )
            return self.of(kind, seq_id)[0]


def handed(num_prompt: int = 8) -> HandoverState:
    return HandoverState(num_prompt, seed=5, ids=[7])


@dataclass(slots=True)
class Pair:
    """A prefill and a decode engine without models."""

    source: ArrayPool
    target: ArrayPool
    giver: RoomGiver
    taker: RoomTaker
    given: Posted
    taken: Posted
    port: int
    key: bytes
    transfer_port: int

    def bootstrap(self, room: int) -> Bootstrap:
        return Bootstrap(room, HOST, self.port)

    def hand_over(self, seq_id: int, room: int, rows: Ids, to: Ids) -> PromptReceived:
        """A whole transfer; both sides call the sequence by the same number."""
        digest = new_bytes()
        self.giver.offer(seq_id, room, digest)
        self.taker.fetch(seq_id, self.bootstrap(room), digest, 0, to)
        self.given.wait(PromptWanted, seq_id)
        self.giver.supply(seq_id, rows, handed())
        return self.taken.wait(PromptReceived, seq_id)


@contextmanager
def bootstrap_server(key: bytes, *, dp_size: int = 1, api_key: str | None = None) -> Iterator[int]:
    """A bootstrap server in a thread; its port."""
    server = BootstrapServer(ServerFacts(1, dp_size, 1, "auto"), key, api_key=api_key)
    with bind_socket(HOST, 0) as sock, answering(server, sock):
        yield sock.getsockname()[1]


@contextmanager
def pair(
    *,
    num_pages: int = 64,
    row_bytes: int = 64,
    share: bool = True,
    checksums: bool = True,
    there: Identity | None = None,
    api_key: str | None = None,
    given_api_key: str | None = None,
    key_of: Callable[[str, int], bytes | None] | None = None,
) -> Iterator[Pair]:
    """there: the identity of the prefill side, if it is another. given_api_key: the
    decode side's. key_of: the keys that the decode side knows, if not that of this pair."""
    key = new_bytes()
    source = ArrayPool(num_pages, row_bytes, seed=1)
    target = ArrayPool(num_pages, row_bytes, seed=2)
    given, taken = Posted(), Posted()
    movers = MoverThread(), MoverThread()
    listener = listening(HOST)
    number = listener.getsockname()[1]
    own, theirs = (
        key if each is None else key_for("transfers", each) for each in (api_key, given_api_key)
    )
    terms = Terms(source, there or identity(), own, checksums, share=share)
    giver = RoomGiver(movers[0], listener, terms, given.post)
    wants = Wants(target, identity(), checksums=False, share=share)
    taker = RoomTaker(movers[1], wants, taken.post, key_of or (lambda *_: theirs))
    with bootstrap_server(key, api_key=api_key) as port:
        movers[0].call(
            lambda: movers[0].spawn(register(HOST, port, key, rank=0, address=HOST, number=number))
        )
        try:
            yield Pair(source, target, giver, taker, given, taken, port, key, number)
        finally:
            for mover in movers:
                mover.stop()
            listener.close()
