"""Grammars made by threads: slow ones, failing ones, ones that never end, and very many; and a loop
that wakes up when one is there."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from setpoint.core.errors import RequestError
from setpoint.core.messages import Prepared, Shutdown, Submit, decode_to_frontend, encode
from setpoint.core.request import Ids, Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.grammar.grammar_threads import MAX_GIVEN_UP, NUM_THREADS, GrammarThreads
from setpoint.ipc.sockets import EngineSocket, MessageSocket
from setpoint.scheduler import loop as loop_module
from setpoint_testing.harness import Harness

NONE = np.zeros(0, np.int32)
WAIT_S = 60.0
"""Longer than any of this can take."""


class Grammar:
    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.thread = threading.get_ident()
        self.ready_in: list[int] = []
        """The threads that made it ready."""

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def fill_mask(self, words: Ids, num_forced: int) -> None:
        words[:] = -1

    def allows(self, token: int) -> bool:
        return True

    def forced(self, most: int) -> list[int]:
        return []

    @property
    def terminated(self) -> bool:
        return False

    def make_ready(self) -> None:
        self.ready_in.append(threading.get_ident())


class Factory:
    """Makes the grammar of a request named slow when ``go`` is set, of one named stuck when
    ``free`` is, and of one named patient never."""

    def __init__(self) -> None:
        self.go, self.free = threading.Event(), threading.Event()
        self.began: queue.SimpleQueue[str] = queue.SimpleQueue()

    def prepare(self) -> None:
        """Nothing to prepare."""

    def constrains(self, request: Request) -> bool:
        return request.rid != "free"

    def is_cached(self, request: Request) -> bool:
        return False

    def __call__(self, request: Request, is_wanted: Callable[[], bool] = lambda: True) -> Grammar:
        self.began.put(request.rid)
        if request.rid == "patient":
            while is_wanted():
                time.sleep(0.001)
            self.began.put("left")
        if request.rid == "slow":
            self.go.wait()
        if request.rid == "stuck":
            self.free.wait()
        if request.rid == "wrong":
            raise RequestError("that is no schema")
        if request.rid == "bug":
            raise RuntimeError("bug")
        return Grammar()


class Inbox:
    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        self.post = self._messages.put

    def get(self) -> Prepared:
        """The next message, without the time that the work took."""
        message = self._messages.get(timeout=WAIT_S)
        assert message.seconds > 0
        return msgspec.structs.replace(message, seconds=0.0)

    def is_empty(self) -> bool:
        return self._messages.empty()


@pytest.fixture
def factory() -> Iterator[Factory]:
    factory = Factory()
    yield factory
    factory.go.set()
    factory.free.set()


def request(rid: str) -> Request:
    return Request(rid=rid, prompt_ids=pack_ids([1, 2]), sampling=SamplingParams(), seed=0)


def test_a_grammar_is_made_elsewhere_behind_the_outputs_that_exist(factory: Factory) -> None:
    inbox = Inbox()
    threads = GrammarThreads(factory, inbox.post)
    assert [threads.needs(0, request(rid)) for rid in ("free", "any")] == [False, True]
    threads.start(7, request("any"), np.array([3, 4], np.int32))
    assert inbox.get() == Prepared(7)
    grammar = threads.take(7)
    assert isinstance(grammar, Grammar)
    assert grammar.accepted == [3, 4]
    assert grammar.thread != threading.get_ident()


def test_a_late_grammar_is_made_ready_elsewhere(factory: Factory) -> None:
    inbox = Inbox()
    threads, grammar = GrammarThreads(factory, inbox.post), Grammar()
    threads.make_ready(7, grammar)
    assert inbox.get() == Prepared(7)
    assert threads.take(7) is grammar
    (thread,) = grammar.ready_in
    assert thread != threading.get_ident()


def test_a_cancelled_one_learns_that_nobody_wants_it(factory: Factory) -> None:
    inbox = Inbox()
    threads = GrammarThreads(factory, inbox.post)
    threads.start(7, request("patient"), NONE)
    assert factory.began.get(timeout=WAIT_S) == "patient"
    threads.cancel(7)
    assert factory.began.get(timeout=WAIT_S) == "left"


def test_a_slow_one_holds_up_nobody(factory: Factory) -> None:
    inbox = Inbox()
    threads = GrammarThreads(factory, inbox.post)
    threads.start(0, request("slow"), NONE)
    for seq_id in range(1, 20):
        threads.start(seq_id, request("any"), NONE)
    assert [inbox.get().seq_id for _ in range(19)] == list(range(1, 20))
    factory.go.set()
    assert inbox.get() == Prepared(0)


def test_failures_are_answers(factory: Factory) -> None:
    inbox = Inbox()
    threads = GrammarThreads(factory, inbox.post)
    threads.start(0, request("wrong"), NONE)
    threads.start(1, request("bug"), NONE)
    found = {message.seq_id: message.finish for message in (inbox.get(), inbox.get())}
    assert found[0] is not None
    assert found[1] is not None
    assert (found[0].status_code, found[0].message) == (400, "that is no schema")
    assert found[1].status_code == 500
    threads.start(2, request("any"), NONE)  # the threads go on
    assert inbox.get() == Prepared(2)


def test_threads_that_never_end_are_replaced_up_to_a_limit(factory: Factory) -> None:
    inbox = Inbox()
    threads = GrammarThreads(factory, inbox.post)
    before = threading.active_count()
    for seq_id in range(MAX_GIVEN_UP):
        threads.start(seq_id, request("stuck"), NONE)
        assert factory.began.get(timeout=WAIT_S) == "stuck"
        threads.cancel(seq_id)
        threads.start(100 + seq_id, request("any"), NONE)
        assert factory.began.get(timeout=WAIT_S) == "any"
        assert inbox.get() == Prepared(100 + seq_id)
    assert threading.active_count() == before + MAX_GIVEN_UP
    for seq_id in range(200, 200 + NUM_THREADS):
        threads.start(seq_id, request("stuck"), NONE)
        assert factory.began.get(timeout=WAIT_S) == "stuck"
        threads.cancel(seq_id)
    threads.start(300, request("any"), NONE)  # nobody is left for it
    threads.cancel(300)
    assert threading.active_count() == before + MAX_GIVEN_UP
    factory.free.set()
    threads.start(301, request("any"), NONE)
    assert inbox.get() == Prepared(301)
    assert inbox.is_empty()  # those that were cancelled say nothing


def test_very_many(factory: Factory) -> None:
    inbox = Inbox()
    threads = GrammarThreads(factory, inbox.post)
    for seq_id in range(5000):
        threads.start(seq_id, request("any"), NONE)
        if seq_id % 3 == 0:
            threads.cancel(seq_id)
    wanted = {seq_id for seq_id in range(5000) if seq_id % 3}
    while wanted:
        seq_id = inbox.get().seq_id
        if seq_id % 3:  # others were there before they were cancelled
            assert isinstance(threads.take(seq_id), Grammar)
            wanted.remove(seq_id)


def test_a_sleeping_loop_wakes_up_for_a_grammar(
    factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "IDLE_WAIT_S", 10 * WAIT_S)
    ours, theirs = socket.socketpair()
    frontend, engine = MessageSocket(ours), EngineSocket(theirs.detach())
    threads = GrammarThreads(factory, engine.post)
    harness = Harness(wire=engine, preparer=threads)  # type: ignore[arg-type]
    running = threading.Thread(target=harness.loop.run)
    running.start()
    frontend.send(encode(Submit(0, request("slow"))))
    assert factory.began.get(timeout=WAIT_S) == "slow"
    factory.go.set()
    ours.setblocking(True)
    ours.settimeout(WAIT_S)
    while True:
        messages = [decode_to_frontend(data) for data in frontend.receive()]
        if any(getattr(message, "events", ()) for message in messages):
            break
    frontend.send(encode(Shutdown()))
    running.join(WAIT_S)
    assert not running.is_alive()
    frontend.close()
    engine.close()
