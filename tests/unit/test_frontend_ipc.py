"""The ZeroMQ link: both ends, in any order of start, with nothing lost and nothing malformed let through."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from setpoint.core.messages import Abort, Finish, Ready, Submit, TokenEvent, Tokens, encode
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.ipc.client import EngineClient, EngineState, Mailbox
from setpoint.frontend.ipc.link import SocketLink
from setpoint.ipc import Endpoints, EngineSocket


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    with Endpoints.in_private_folder() as made:
        folder = Path(made.to_engine.removeprefix("ipc://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        yield made
    assert not folder.exists()


FORK = """
import os, sys
from setpoint.ipc import Endpoints
manager = Endpoints.in_private_folder()
folder = os.path.dirname(manager.__enter__().to_engine.removeprefix("ipc://"))
if os.fork() == 0:
    sys.exit(0)
os.wait()
print(os.path.isdir(folder))
manager.__exit__(None, None, None)
print(os.path.isdir(folder))
"""


def test_a_forked_child_leaves_the_folder_to_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\nFalse\n", "")


def request(rid: str, num_prompt: int = 3) -> Request:
    return Request(rid=rid, prompt_ids=pack_ids(range(num_prompt)), sampling=SamplingParams())


def receive_some(socket: EngineSocket) -> list[object]:
    return list(socket.receive(timeout_s=5))


def test_requests_go_out_and_tokens_come_back_in_order(endpoints: Endpoints) -> None:
    async def scenario() -> None:
        client = EngineClient(SocketLink(endpoints))
        client.start()
        engine = EngineSocket(endpoints)
        try:
            engine.send(Ready({"max_req_input_len": 7}))
            assert await client.wait_ready(timeout_s=5)
            assert client.info == {"max_req_input_len": 7}
            mailbox = Mailbox()
            client.submit(request("a", 100_000), mailbox, 0)
            client.submit(request("b"), mailbox, 1)
            client.abort("zzz")
            received: list[object] = []
            while len(received) < 3:
                received += await asyncio.to_thread(receive_some, engine)
            assert [type(message) for message in received] == [Submit, Submit, Abort]
            assert isinstance(received[0], Submit)
            assert received[0].request.prompt().tolist() == list(range(100_000))
            for token in range(500):
                engine.send(Tokens([TokenEvent("a", [token]), TokenEvent("b", [token]), TokenEvent("stranger", [1])]))
            engine.send(Tokens([TokenEvent(rid, [], Finish("length", length=500)) for rid in "ab"]))
            seen: dict[int, list[int]] = {0: [], 1: []}
            num_finished = wake_ups = 0
            while num_finished < 2:
                wake_ups += 1
                for index, event in await asyncio.wait_for(mailbox.take(), 5):
                    seen[index] += event.ids
                    num_finished += event.finish is not None
            assert seen == {0: list(range(500)), 1: list(range(500))}
            assert wake_ups <= 501, "one wake-up per message at most"
            assert client.num_open == 0
        finally:
            client.close()
            engine.close()

    asyncio.run(scenario())


def test_an_engine_that_starts_first_or_late_misses_nothing(endpoints: Endpoints) -> None:
    engine = EngineSocket(endpoints)
    engine.send(Ready({}))

    async def scenario() -> None:
        client = EngineClient(SocketLink(endpoints))
        client.start()
        assert await client.wait_ready(timeout_s=5)
        client.submit(request("a"), Mailbox())
        await asyncio.sleep(0)
        client.shutdown()
        assert client.state is EngineState.STOPPING
        messages: list[object] = []
        while len(messages) < 2:
            messages += receive_some(engine)
        assert [type(message).__name__ for message in messages] == ["Submit", "Shutdown"]
        client.close()

    try:
        asyncio.run(scenario())
    finally:
        engine.close()


def test_receive_waits_as_long_as_asked_and_drops_what_is_malformed(endpoints: Endpoints, caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineSocket(endpoints)
    link = SocketLink(endpoints)
    try:
        assert engine.receive() == []
        started = time.monotonic()
        assert engine.receive(timeout_s=0.1) == []
        assert 0.09 <= time.monotonic() - started < 2
        for data in (b"junk", b"", encode(Ready({})), b"\x81\xa4type\xa3\xff\xff\xff"):
            link.send(data)
        link.send(encode(Submit(request("good"))))
        messages: list[object] = []
        while not messages:
            messages = receive_some(engine)
        assert [message.request.rid for message in messages if isinstance(message, Submit)] == ["good"]
        assert sum("malformed" in record.message for record in caplog.records) == 4
    finally:
        link.close()
        engine.close()
