"""A decode server's own choice of prefill servers: what is sent to whom, and what is computed alone."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from setpoint.core.errors import RequestError
from setpoint.core.request import LogprobOptions, Request, RequestOptions, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.handover import prefill_servers
from setpoint.handover.prefill_servers import PairedBody, PrefillServers
from setpoint_testing.harness import ids_of

PATH = "/v1/completions"


def request(**options: Any) -> Request:
    return Request(
        rid="r",
        prompt_ids=pack_ids(ids_of([1, 2])),
        prior_output_ids=b"",
        sampling=SamplingParams(),
        seed=0,
        options=RequestOptions(**options),
    )


class Peer:
    """An HTTP server that says that it is a prefill server."""

    def __init__(self, info: bytes, status: int = 200) -> None:
        self.info, self.status = info, status
        self.heads: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.answers = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        self.heads.append(head)
        answer, status = self.info, self.status
        if head.startswith("POST"):
            self.bodies.append(json.loads(body))
            await self.answers.wait()
            answer = b"{}"
        writer.write(b"HTTP/1.1 %d X\r\nConnection: close\r\n\r\n" % status + answer)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def peer(info: bytes, status: int = 200) -> AsyncIterator[Peer]:
    found = Peer(info, status)
    async with await asyncio.start_server(found.serve, "127.0.0.1", 0) as server:
        found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield found


@asynccontextmanager
async def watching(servers: PrefillServers) -> AsyncIterator[None]:
    task = asyncio.create_task(servers.watch())
    await asyncio.sleep(0.3)
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def send(paired: PairedBody) -> None:
    paired.noting(lambda job: None)("job")


def test_a_request_that_has_ended_is_taken_back() -> None:
    async def run() -> None:
        async with peer(info(11)) as one:
            servers = PrefillServers([one.url], api_key=None)
            async with watching(servers):
                paired = servers.pair(PATH, [request(), request()], {})
                assert paired is not None
                told: list[Any] = []
                ended = paired.recording(told.append)
                paired.noting(told.append)("job")
                await asyncio.sleep(0.1)
                task = paired.sending
                assert task is not None
                ended(1)
                await asyncio.sleep(0.05)
                assert not task.done(), "the other one goes on"
                ended(2)
                await asyncio.sleep(0.05)
                assert task.cancelled()
                assert told == ["job", 1, 2]
                one.answers.set()

    asyncio.run(run())


def info(port: int) -> bytes:
    return b'{"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": %d, "x": 1}' % port


def test_it_tells_which_servers_take_prompts() -> None:
    async def run() -> None:
        async with peer(info(11)) as one, peer(b"{}") as other:
            servers = PrefillServers([one.url, other.url], api_key=None)
            assert servers.up() == {one.url: False, other.url: False}
            assert servers.pair(PATH, [request()], {}) is None
            assert servers.num_alone == 1
            async with watching(servers):
                assert servers.up() == {one.url: True, other.url: False}
                assert servers.pair(PATH, [request()], {}) is not None
            assert servers.num_alone == 1

    asyncio.run(run())


def test_bodies_go_to_the_server_with_the_fewest_open_requests() -> None:
    async def run() -> None:
        async with peer(info(11)) as one, peer(info(12)) as two:
            servers = PrefillServers([one.url, two.url], api_key="secret")
            async with watching(servers):
                body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
                rooms = set()
                for _ in range(4):
                    paired = servers.pair(PATH, [request()], body)
                    assert paired is not None
                    assert paired.body["stream"] is True, "the client's own answer is streamed"
                    rooms.add(paired.body["bootstrap_room"])
                    send(paired)
                    await asyncio.sleep(0.05)
                assert len(rooms) == 4
                for each, port in ((one, 11), (two, 12)):
                    assert len(each.bodies) == 2
                    assert each.heads[-1].startswith(f"POST {PATH} HTTP/1.1")
                    assert "Authorization: Bearer secret" in each.heads[-1]
                    sent = each.bodies[0]
                    assert (sent["prompt"], sent["stream"]) == ("a", False)
                    assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("127.0.0.1", port)
                    assert "stream_options" not in sent
                    each.answers.set()
                await asyncio.sleep(0.1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "options", "body"),
    [
        ("/v1/responses", {}, {}),
        ("", {}, {}),
        ("/generate", {}, {"session_params": {"id": "s"}}),
        (PATH, {}, {"best_of": 3}),
        (PATH, {"logprobs": LogprobOptions(start=0)}, {}),
    ],
)
def test_what_one_server_alone_knows_is_computed_alone(
    path: str, options: dict[str, Any], body: dict[str, Any]
) -> None:
    async def run() -> None:
        async with peer(info(11)) as one:
            servers = PrefillServers([one.url], api_key=None)
            async with watching(servers):
                assert servers.pair(PATH, [request()], {}) is not None
                assert servers.pair(path, [request(**options)], body) is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        (b'{"disaggregation_mode": "null"}', 200, "it has no --disaggregation-mode prefill"),
        (b"[1]", 200, "Expected `object`"),
        (b"no JSON", 200, "malformed"),
        (b"", 401, "it answers 401"),
        (b'{"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": -4}', 200, ">= 0"),
    ],
)
def test_other_servers_are_not_used(
    answer: bytes, status: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with peer(answer, status) as one:
            servers = PrefillServers([one.url], api_key=None)
            async with watching(servers):
                assert servers.pair(PATH, [request()], {}) is None

    asyncio.run(run())
    assert "is not used (" in caplog.text
    assert why in caplog.text
    assert "It is asked again every second; as long as none answers, this server" in caplog.text
    assert "No prefill server answers" in caplog.text


def test_a_server_that_is_not_there_yet_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """Red before: ``is not used: Connection refused.`` read as if it were for good."""

    async def run() -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
            async with watching(PrefillServers([url], api_key=None)):
                assert caplog.messages == [
                    f"The prefill server at {url} does not answer (Connection refused). It is asked"
                    " again every second; as long as none answers, this server computes prompts"
                    " itself."
                ]

    asyncio.run(run())


def test_a_server_that_has_gone_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefill_servers, "LOOK_S", 0.05)

    async def run() -> None:
        async with peer(info(11)) as one:
            servers = PrefillServers([one.url], api_key=None)
            async with watching(servers):
                pass
        paired = servers.pair(PATH, [request()], {})
        assert paired is not None
        other = servers.pair(PATH, [request()], {})
        assert other is not None
        send(paired)
        send(other)
        await asyncio.sleep(0.2)
        assert servers.pair(PATH, [request()], {}) is None
        again = Peer(info(13))
        port = int(one.url.rsplit(":", 1)[1])
        async with await asyncio.start_server(again.serve, "127.0.0.1", port), watching(servers):
            paired = servers.pair(PATH, [request()], {})
            assert paired is not None
            assert paired.body["bootstrap_port"] == 13

    asyncio.run(run())
    lines = [line for line in caplog.messages if "ended before it had answered request" in line]
    assert len(lines) == 1, "one line for one end"
    assert "Errno" not in lines[0]
    assert "this server computes the prompt" in lines[0]


def test_a_request_can_name_a_server_that_has_answered() -> None:
    async def run() -> None:
        async with peer(info(11)) as one:
            servers = PrefillServers([one.url], api_key=None)
            with pytest.raises(RequestError, match="has not answered this server yet") as early:
                servers.known("127.0.0.1", 11)
            assert early.value.status_code == 503
            async with watching(servers):
                assert servers.known("127.0.0.1", 11) == ("127.0.0.1", 11)
            for host, port in (("127.0.0.1", 12), ("localhost", 11), ("192.0.2.1", 11)):
                with pytest.raises(RequestError, match="is none of this server's") as refused:
                    servers.known(host, port)
                assert refused.value.status_code == 400

    asyncio.run(run())
