"""The link to the engine: both ends, in any order of start, with nothing lost and nothing malformed
let through."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Iterator

import pytest

from setpoint.core.errors import RequestError
from setpoint.core.messages import (
    Abort,
    Finish,
    Ready,
    Shutdown,
    Stop,
    Submit,
    ToFrontend,
    TokenEvent,
    Tokens,
    decode_to_frontend,
    encode,
)
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.ipc.client import EngineClient
from setpoint.ipc.engine_life import EngineState
from setpoint.ipc.line import EngineLine
from setpoint.ipc.link import SocketLink
from setpoint.ipc.mailbox import Mailbox
from setpoint.ipc.sockets import EngineSocket, MessageSocket
from setpoint_testing.fake_engine import SOME_FACTS

Ends = tuple[SocketLink, EngineSocket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    link, engine = SocketLink(ours), EngineSocket(theirs.detach())
    yield link, engine
    link.close()
    engine.close()


def request(rid: str, num_prompt: int = 3) -> Request:
    return Request(
        rid=rid, prompt_ids=pack_ids(range(num_prompt)), sampling=SamplingParams(), seed=0
    )


def nobody() -> None:
    """Nobody wants to know that the link is cut."""


def receive_some(engine: EngineSocket) -> list[object]:
    return list(engine.receive(timeout_s=60))


def test_requests_go_out_and_tokens_come_back_in_order(ends: Ends) -> None:
    link, engine = ends

    async def scenario() -> None:
        client, line = EngineClient(), EngineLine(link)
        client.attach(line)
        try:
            engine.send(Ready(SOME_FACTS))
            assert await line.wait_ready(timeout_s=60)
            assert line.facts == SOME_FACTS
            mailbox = Mailbox()
            client.submit(request("a", 100_000), mailbox, 0)
            client.submit(request("b"), mailbox, 1)
            client.abort("a")
            received: list[object] = []
            while len(received) < 3:
                received += await asyncio.to_thread(receive_some, engine)
            assert [type(message) for message in received] == [Submit, Submit, Abort]
            assert isinstance(received[0], Submit)
            assert received[0].request.prompt().tolist() == list(range(100_000))
            for token in range(500):
                count = token + 1
                known = [TokenEvent(each, [token], num_outputs=count) for each in (0, 1)]
                engine.send(Tokens([*known, TokenEvent(2, [1])]))
            engine.send(
                Tokens([TokenEvent(seq_id, [], Finish("length", length=500)) for seq_id in (0, 1)])
            )
            seen: dict[int, list[int]] = {0: [], 1: []}
            num_finished = wake_ups = 0
            while num_finished < 2:
                wake_ups += 1
                assert (
                    engine.receive() == []
                )  # an engine looks every step, and sends what the kernel had no room for
                for index, event in await asyncio.wait_for(mailbox.take(), 5):
                    seen[index] += event.ids
                    num_finished += event.finish is not None
            assert seen == {0: list(range(500)), 1: list(range(500))}
            assert wake_ups <= 501, "one wake-up per message at most"
            assert client.num_open == 0
        finally:
            client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "late",
    [TokenEvent(0, [13]), TokenEvent(0, [13], Finish("length", length=9))],
    ids=["tokens", "the end"],
)
def test_late_events_of_a_stopped_request_do_not_reach_the_next_one_with_its_rid(
    ends: Ends, late: TokenEvent
) -> None:
    link, engine = ends

    async def scenario() -> None:
        client, line = EngineClient(), EngineLine(link)
        client.attach(line)
        engine.send(Ready(SOME_FACTS))
        assert await line.wait_ready(timeout_s=60)
        old = client.submit(request("again"), Mailbox())
        with pytest.raises(RequestError, match="Duplicate request ID 'again'"):
            client.submit(request("again"), Mailbox())
        client.stop(old)
        mailbox = Mailbox()
        new = client.submit(request("again"), mailbox)
        client.stop(old)  # of no consequence any more
        own = TokenEvent(new, [7], Finish("length", length=1), num_outputs=1)
        engine.send(Tokens([late, own]))
        assert await asyncio.wait_for(mailbox.take(), 5) == deque([(0, own)])
        assert client.num_open == 0
        client.close()
        assert [type(message) for message in receive_some(engine)] == [Submit, Stop, Submit]

    asyncio.run(scenario())


def test_an_abort_reaches_the_open_requests_whose_rid_begins_with_it(ends: Ends) -> None:
    link, engine = ends

    async def scenario() -> None:
        client, line = EngineClient(), EngineLine(link)
        client.attach(line)
        engine.send(Ready(SOME_FACTS))
        assert await line.wait_ready(timeout_s=60)
        gone, *numbers = (
            client.submit(request(rid), Mailbox()) for rid in ("job-0", "job-1", "job-2", "other")
        )
        client.stop(gone)
        client.abort("job-")
        client.abort("jobs")
        client.abort("")
        client.abort(abort_all=True)
        messages = receive_some(engine)
        assert [message.seq_ids for message in messages if isinstance(message, Abort)] == [
            numbers[:2],
            numbers,
        ]
        client.close()

    asyncio.run(scenario())


def test_an_engine_that_starts_first_or_late_misses_nothing(ends: Ends) -> None:
    link, engine = ends
    engine.send(Ready(SOME_FACTS))

    async def scenario() -> None:
        client, line = EngineClient(), EngineLine(link)
        client.attach(line)
        assert await line.wait_ready(timeout_s=60)
        client.submit(request("a"), Mailbox())
        await asyncio.sleep(0)
        client.shutdown()
        assert line.life.state is EngineState.STOPPING
        messages: list[object] = []
        while len(messages) < 2:
            messages += receive_some(engine)
        assert [type(message).__name__ for message in messages] == ["Submit", "Shutdown"]
        client.close()

    asyncio.run(scenario())


def test_receive_waits_as_long_as_asked_and_drops_what_is_malformed(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    link, engine = ends
    assert engine.receive() == []
    started = time.monotonic()
    assert engine.receive(timeout_s=0.1) == []
    assert time.monotonic() - started >= 0.09
    for data in (b"junk", b"", encode(Ready(SOME_FACTS)), b"\x81\xa4type\xa3\xff\xff\xff"):
        link.send(data)
    link.send(encode(Submit(0, request("good"))))
    messages: list[object] = []
    while not messages:
        messages = receive_some(engine)
    assert [message.request.rid for message in messages if isinstance(message, Submit)] == ["good"]
    assert sum("malformed" in record.message for record in caplog.records) == 4


def test_neither_end_waits_for_the_other(ends: Ends) -> None:
    """Far more than the kernel buffers, both ways, while nobody reads; then every byte is there, in
    order."""
    link, engine = ends
    events = [Tokens([TokenEvent(0, list(range(token, token + 1000)))]) for token in range(500)]
    received: list[ToFrontend] = []

    async def scenario() -> None:
        link.start(lambda data: received.append(decode_to_frontend(data)), nobody)
        for number in range(20):
            link.send(encode(Submit(number, request(f"{number}", 100_000))))
        for event in events:
            engine.send(event)
        submitted: list[object] = []
        async with asyncio.timeout(30):
            while len(submitted) < 20 or len(received) < 500:
                submitted += engine.receive()
                await asyncio.sleep(0)
        assert [message.request.rid for message in submitted if isinstance(message, Submit)] == [
            f"{number}" for number in range(20)
        ]
        assert received == events

    asyncio.run(scenario())


def test_an_idle_engine_wakes_to_send_what_waits(ends: Ends) -> None:
    link, engine = ends
    engine.send(Tokens([TokenEvent(0, list(range(1_000_000)))]))
    received: list[bytes] = []

    async def scenario() -> None:
        link.start(received.append, nobody)
        async with asyncio.timeout(30):
            while not received:
                assert await asyncio.to_thread(engine.receive, 0.2) == []

    asyncio.run(scenario())


def test_a_frontend_that_is_gone_means_shutdown(ends: Ends) -> None:
    link, engine = ends
    link.send(encode(Submit(0, request("a"))))
    link.close()
    assert [type(message) for message in [*engine.receive(5), *engine.receive(5)]] == [
        Submit,
        Shutdown,
    ]
    engine.send(Ready(SOME_FACTS))  # nobody to read it


def test_an_engine_that_is_gone_leaves_its_last_words(ends: Ends) -> None:
    link, engine = ends
    engine.send(Ready(SOME_FACTS))
    engine.close()
    received: list[bytes] = []

    async def scenario() -> None:
        link.start(received.append, nobody)
        while not received:
            await asyncio.sleep(0.001)
        link.send(encode(Shutdown()))  # nobody to read it

    asyncio.run(scenario())
    assert received == [encode(Ready(SOME_FACTS))]


def test_a_message_in_pieces_is_whole_when_it_is_handed_out() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        messages = MessageSocket(theirs)
        for byte in b"\x03\0\0\0abc\x01\0\0\0":
            assert messages.receive() == ([b"abc"] if byte == 1 else [])
            ours.send(bytes([byte]))
        ours.send(b"d")
        assert messages.receive() == [b"d"]
        messages.close()
