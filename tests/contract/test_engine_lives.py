"""A frontend outlives its engine: processes die in every way while requests run, and with the next
one that is attached everything works, with nothing left of the one before."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from setpoint.frontend.apis.dialects import DIALECTS
from setpoint.frontend.composition import compose
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.http.app import create_app
from setpoint.frontend.service import Service
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine
from setpoint.launch.parent.process import ChildProcess, kill_with_children
from setpoint_testing.byte_tokenizer import make_byte_tokenizer
from setpoint_testing.fake_engine import FixedOptions
from setpoint_testing.harness import ids_of
from setpoint_testing.scripted import hashed_token, reference
from setpoint_testing.scripted_engine import CONTEXT, FLOOD_IDS, MAX_RUNNING, VOCAB, Deadly

PATIENCE_S = 30
NUM_STREAMS = 6
"""More than run at once."""


class Life:
    """One engine process on a line of its own, watched as a server watches it."""

    def __init__(self, service: Service, *, watchdog_s: float = 300.0) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "setpoint_testing.scripted_engine"]
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        engine = ChildProcess(self.process, ours)
        self.line = EngineLine(engine.open_link())
        service.engine.attach(self.line)
        self._watcher = asyncio.create_task(engine.watch(self.line, watchdog_s=watchdog_s))

    async def ready(self) -> None:
        assert await self.line.wait_ready(timeout_s=PATIENCE_S), self.line.life.death

    async def running(self, count: int) -> None:
        """Wait until so many requests run."""
        while (await self.line.get_state()).num_running < count:
            await asyncio.sleep(0.001)

    async def end(self) -> None:
        """Wait until the process is gone and the line knows."""
        async with asyncio.timeout(PATIENCE_S):
            await self._watcher


class Server:
    def __init__(self, service: Service, http: httpx.AsyncClient) -> None:
        self.service = service
        self.http = http
        self.lives: list[Life] = []

    async def begin(self, *, watchdog_s: float = 300.0) -> Life:
        self.lives.append(Life(self.service, watchdog_s=watchdog_s))
        await self.lives[-1].ready()
        return self.lives[-1]

    async def status(self, path: str) -> int:
        return (await self.http.get(path)).status_code

    async def post(self, ids: list[int], num: int = 5, **body: Any) -> httpx.Response:
        sampling = {"max_new_tokens": num, "temperature": 0}
        return await self.http.post(
            "/generate", json={"input_ids": ids, "sampling_params": sampling, **body}
        )

    async def stream(self, rid: str) -> tuple[list[int], str]:
        """The ids of a long answer, and the error that ended it."""
        found: list[int] = []
        sampling = {"max_new_tokens": 3000, "temperature": 0}
        body = {"input_ids": prompt_of(rid), "rid": rid, "stream": True}
        async with self.http.stream(
            "POST", "/generate", json={**body, "sampling_params": sampling}
        ) as response:
            if response.status_code != 200:  # it has not begun
                return [], (await response.aread()).decode()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return found, chunk["error"]["message"]
                found = chunk["output_ids"]
        return found, ""


def prompt_of(rid: str) -> list[int]:
    return [1, 2, 3, *rid.encode()[-3:]]


def answer_to(prompt: list[int], num: int) -> list[int]:
    return reference(ids_of(prompt), num, hashed_token(VOCAB))


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    """The real application, without an engine."""
    config = FrontendConfig(
        "tiny", "tiny", "", context_len=CONTEXT, max_req_input_len=CONTEXT - 5, vocab_size=256
    )
    text = TextProcessor(Tokenizer(make_byte_tokenizer()))
    service = compose(config, EngineClient(), text, FixedOptions())
    app = create_app(service, DIALECTS)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", timeout=PATIENCE_S
    ) as http:
        server = Server(service, http)
        try:
            yield server
        finally:
            service.engine.shutdown()
            for life in server.lives:
                kill_with_children(life.process)
                await life.end()
            service.engine.close()


def run(scenario: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with serving() as server:
            await scenario(server)

    asyncio.run(main())


async def is_as_new(server: Server, life: Life) -> None:
    """Every way in works, under rids that were open when the engine before died."""
    assert [await server.status(path) for path in ("/health", "/health_generate", "/ready")] == [
        200
    ] * 3
    answers = await asyncio.gather(
        *(server.post(prompt_of(f"s{n}"), 5, rid=f"s{n}") for n in range(NUM_STREAMS))
    )
    for number, response in enumerate(answers):
        assert response.status_code == 200, response.text
        assert response.json()["output_ids"] == answer_to(prompt_of(f"s{number}"), 5)
    aborted = asyncio.create_task(server.post([7, 8], 3000, rid="long"))
    while server.service.engine.num_open == 0:
        await asyncio.sleep(0.001)
    assert (await server.http.post("/abort_request", json={"rid": "long"})).status_code == 200
    assert (await aborted).json()["meta_info"]["finish_reason"]["type"] == "abort"
    info = (await server.http.get("/server_info")).json()
    assert info["kernels"] == f"process {life.process.pid}"
    assert info["internal_states"][0]["num_running"] == 0
    assert (await server.http.post("/flush_cache")).status_code == 200


async def is_refused(server: Server, reason: str) -> None:
    """Without an engine, and at once."""
    async with asyncio.timeout(PATIENCE_S):
        response = await server.post([1, 2])
        assert (response.status_code, reason in response.text) == (503, True), response.text
        assert int(response.headers["retry-after"]) > 0
        for path in ("/health", "/health_generate", "/ready", "/server_info"):
            assert await server.status(path) == 503, path
        assert (await server.http.post("/flush_cache")).status_code == 503
        # There is nothing to abort, and saying so is no error.
        abort = await server.http.post("/abort_request", json={"abort_all": True})
        assert abort.status_code == 200
    assert server.service.engine.num_open == 0


DEATHS = {
    Deadly.KILL: "was ended by SIGKILL",
    Deadly.LATER: "was ended by SIGKILL",
    Deadly.TORN: "was ended by SIGKILL",
    Deadly.FLOOD: "was ended by SIGKILL",
    Deadly.CUT: "has closed its link",
    Deadly.EXIT: "ended with exit code 3",
    Deadly.HANG: "has not finished a step for 5 s (--watchdog-timeout)",
    Deadly.HANG_LOCKED: "has not finished a step for 5 s (--watchdog-timeout)",
}
WATCHDOG_S = 5.0


@pytest.mark.parametrize(
    "deadly",
    [
        pytest.param(
            each,
            id=each.name.lower(),
            marks=[pytest.mark.full] if each is Deadly.HANG else [],
        )
        for each in Deadly
    ],
)
def test_an_engine_that_dies_takes_its_requests_with_it_and_nothing_else(
    deadly: Deadly, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: Server) -> None:
        await is_refused(server, "There is no engine yet.")
        first = await server.begin(watchdog_s=WATCHDOG_S)
        await is_as_new(server, first)
        streams = [asyncio.create_task(server.stream(f"s{n}")) for n in range(3)]
        await first.running(3)
        poisoned = asyncio.create_task(server.post([5, deadly], 100, rid="poison"))
        for number, task in enumerate(streams):
            ids, error = await asyncio.wait_for(task, PATIENCE_S)
            assert DEATHS[deadly] in error
            assert ids == answer_to(prompt_of(f"s{number}"), len(ids))
        assert (await poisoned).status_code == 503
        await first.end()
        await is_refused(server, DEATHS[deadly])

        second = Life(server.service)
        server.lives.append(second)
        await is_refused(server, "The engine is starting.")
        await second.ready()
        await is_as_new(server, second)
        assert first.process.returncode is not None, "a process without a link is ended"

    with caplog.at_level(logging.ERROR):
        run(scenario)
    (blame,) = (record.getMessage() for record in caplog.records if " died: " in record.message)
    suspects = blame.partition("Requests of the steps in flight: ")[2].split(", ")
    # A step that reads a prompt computes nobody else; a decode step computes all that run.
    others = {"s0", "s1", "s2"} if deadly is Deadly.LATER else set()
    assert set(suspects) == {"poison"} | others


@pytest.mark.parametrize("is_busy", [True, pytest.param(False, marks=pytest.mark.full)])
def test_an_engine_that_is_paused_for_longer_than_the_watchdog_lives_on(is_busy: bool) -> None:
    """Red before: a timer inside the engine fired as soon as it went on."""

    async def scenario(server: Server) -> None:
        life = await server.begin(watchdog_s=WATCHDOG_S)
        await is_as_new(server, life)
        stream = asyncio.create_task(server.stream("s0")) if is_busy else None
        if is_busy:
            await life.running(1)
        for _ in range(2):
            life.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(WATCHDOG_S + 1)
            life.process.send_signal(signal.SIGCONT)
            assert (await server.post([1, 2], 3)).json()["output_ids"] == answer_to([1, 2], 3)
        if stream is not None:
            assert await stream == (answer_to(prompt_of("s0"), 3000), "")
        await is_as_new(server, life)

    run(scenario)


def test_a_watchdog_shows_the_stacks_of_an_engine_that_hangs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def scenario(server: Server) -> None:
        life = await server.begin(watchdog_s=WATCHDOG_S)
        response = await server.post([Deadly.HANG_LOCKED], 3)
        assert response.status_code == 503
        await life.end()

    run(scenario)
    stacks = capfd.readouterr().err
    assert "most recent call first" in stacks
    assert "scripted_engine.py" in stacks


def test_an_idle_engine_that_dies_has_no_suspects(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Server) -> None:
        life = await server.begin()
        await is_as_new(server, life)
        life.process.kill()
        await life.end()

    with caplog.at_level(logging.ERROR):
        run(scenario)
    (blame,) = (record.getMessage() for record in caplog.records)
    assert "was ended by SIGKILL" in blame
    assert blame.endswith("Requests of the steps in flight: none")


def test_engines_may_die_again_and_again_while_counts_go_on() -> None:
    """Waiting requests and calls without an answer end with their engine, too."""

    async def scenario(server: Server) -> None:
        for number in range(3):
            life = await server.begin()
            ok = await server.post([number], 3)
            assert ok.json()["output_ids"] == answer_to([number], 3)
            streams = [asyncio.create_task(server.stream(f"s{n}")) for n in range(NUM_STREAMS)]
            await life.running(MAX_RUNNING)
            life.process.send_signal(signal.SIGSTOP)
            info = asyncio.create_task(server.http.get("/server_info"))
            await asyncio.sleep(0.05)
            assert not info.done()
            life.process.kill()
            assert (await info).status_code == 503
            for task in streams:
                assert "was ended by SIGKILL" in (await asyncio.wait_for(task, PATIENCE_S))[1]
            await life.end()
            book = server.service.events.book
            assert book.num_sequences == (number + 1) * (1 + NUM_STREAMS)
            assert book.num_aborted == (number + 1) * NUM_STREAMS

    run(scenario)


def test_what_an_old_engine_still_had_to_say_reaches_nobody() -> None:
    """It floods the link with the numbers of requests to come, and nobody waits for it to die."""

    async def scenario(server: Server) -> None:
        first = await server.begin()
        dying = asyncio.create_task(server.post([Deadly.FLOOD], 5))
        await asyncio.to_thread(first.process.wait, PATIENCE_S)  # the socket holds what it said
        first.line.died("Given up.")
        assert (await dying).status_code == 503
        second = await server.begin()
        await is_as_new(server, second)
        answers = [await server.post([n], 5) for n in range(20)]
        assert not any(set(FLOOD_IDS) & set(each.json()["output_ids"]) for each in answers)

    run(scenario)
