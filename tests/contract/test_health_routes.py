"""Health, readiness, and an engine that starts, stops or fails to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from setpoint.core.messages import Alive, Announce, Failed
from setpoint.frontend.health import RECENT_S
from setpoint.ipc.line import EngineLine
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
PATIENCE_S = 60.0


def slow(**options: Any) -> FakeEngine:
    return FakeEngine(script=lambda request: list(b"x" * 200), step_s=0.005, **options)


def test_health_submits_a_token_and_believes_any_message(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for path in ("/health", "/health_generate"):
            response = await server.http.get(path)
            assert (response.status_code, response.content) == (200, b"")
        probe = server.engine.submitted[0]
        assert probe.rid.startswith("HEALTH_CHECK_")
        assert (probe.prompt().tolist(), probe.sampling.max_new_tokens) == ([0], 1)
        assert len(server.engine.submitted) == 1, (
            "the probe's own token answers the second question"
        )
        server.engine.silent = True
        server.line._result_at -= RECENT_S
        started = time.monotonic()
        assert (await server.http.get("/health")).status_code == 503
        assert time.monotonic() - started >= 0.2
        assert (await server.http.get("/ready")).status_code == 200

    serve(scenario)


def test_health_of_a_busy_server_costs_nothing(serve: Serve) -> None:
    """Red before: each question was one more request to prefill."""

    async def scenario(server: Any) -> None:
        busy = asyncio.create_task(
            server.generate(text="a", sampling_params={"max_new_tokens": 60})
        )
        while not server.engine.running:
            await asyncio.sleep(0.001)
        for _ in range(10):
            assert (await server.http.get("/health")).status_code == 200
            server.line._result_at -= RECENT_S  # nothing for a while: a long prefill
        await busy
        assert len(server.engine.submitted) == 1

    serve(scenario, slow())


def test_health_does_not_wait_for_a_long_step(serve: Serve) -> None:
    """A step of a large prompt takes seconds, and the engine answers no call before its end. Red
    before: the probe waited for it."""

    async def scenario(server: Any) -> None:
        server.engine.silent = server.engine.mute = True
        busy = asyncio.create_task(server.generate(text="a"))
        while not server.engine.running:
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            server.line._heard_at -= 3600
            asked = asyncio.create_task(server.http.get("/health"))
            await asyncio.sleep(0.05)
            assert not asked.done(), "nothing has been heard of the engine for an hour"
            server.engine.emit(Announce({0: "a"}, []))
            assert (await asked).status_code == 200
            assert (await server.http.get("/health")).status_code == 200
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        assert len(server.engine.submitted) == 1

    serve(scenario, FakeEngine(), health_timeout_s=10 * PATIENCE_S)


def test_an_engine_in_a_step_of_a_minute_is_healthy(serve: Serve) -> None:
    """Only the watchdog can tell a long step from one that hangs. Red before: the probe waited for
    its whole time limit and then answered 503."""

    async def scenario(server: Any) -> None:
        server.engine.silent = server.engine.mute = True
        busy = asyncio.create_task(server.generate(text="a"))
        while not server.engine.running:
            await asyncio.sleep(0)
        server.engine.emit(Announce({0: "a"}, []))
        for silence_s, status in ((60, 200), (3600, 503)):
            server.line._heard_at -= silence_s
            for path in ("/health", "/health_generate"):
                assert (await server.http.get(path)).status_code == status, path
            assert (await server.http.get("/ready")).status_code == 200
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)

    serve(scenario, FakeEngine())


def test_a_silent_engine_with_requests_is_not_healthy(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        server.engine.silent = server.engine.mute = True
        busy = asyncio.create_task(server.generate(text="a"))
        while not server.engine.running:
            await asyncio.sleep(0)
        server.line._heard_at -= 3600
        assert (await server.http.get("/health")).status_code == 503
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)

    serve(scenario, FakeEngine())


def test_a_stopped_engine_is_not_ready(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for is_suspended, status in ((True, 503), (False, 200)):
            server.line.suspended(is_suspended)
            for path in ("/ready", "/ping", "/health", "/health_generate"):
                assert (await server.http.get(path)).status_code == status, path

    serve(scenario)


async def told(server: Any) -> tuple[int, str]:
    answer = await server.http.get("/ready")
    return answer.status_code, answer.text


def gone_for(server: Any, rank: int, seconds: float) -> None:
    """Make it look as if the rank had been gone for so many seconds longer."""
    server.service.engine._presence._gone_since[rank] -= seconds


def test_ready_misses_a_rank_that_is_gone_for_longer_than_a_restart_may_take(serve: Serve) -> None:
    """Red before: 200 for ever."""

    async def scenario(server: Any) -> None:
        client, lives = server.service.engine, []
        client.lives.recovers = True

        def attach() -> EngineLine:
            engine = FakeEngine(loads=True)
            lives.append((engine, EngineLine(engine, rank=1)))
            client.attach(lives[-1][1])
            return lives[-1][1]

        attach()
        client._presence._started_at[lives[0][1]] -= 20.0
        lives[0][0].loaded()
        assert await told(server) == (200, "")
        lives[0][1].died("It is dead.")
        assert await told(server) == (200, "engine 1: restarting\n")
        gone_for(server, 1, 45.0)  # twice the start, and ten seconds
        assert (await told(server))[0] == 200
        gone_for(server, 1, 10.0)
        assert await told(server) == (503, "engine 1: restarting\n")
        assert (await server.http.get("/health")).status_code == 200, "the other one serves"
        attach()
        assert (await told(server))[0] == 503, "an attempt to start is no engine"
        lives[1][0].loaded()
        assert await told(server) == (200, "")
        lives[1][1].died("It is dead, too.")
        client.lost(1, "No restart is left.")
        assert await told(server) == (503, "engine 1: ended\n"), "at once: none comes"
        client.lives.want(1)
        attach()
        lives[2][0].loaded()
        client.retire(1, "An operator wants it.")
        assert await told(server) == (200, "engine 1: ended\n")

    serve(scenario)


def test_ready_shows_a_pause_and_misses_an_engine_that_stands_still_unasked(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        http, line = server.http, server.line
        await http.post("/pause_generation", json={"mode": "in_place"})
        server.engine.emit(Alive(stands_still=True))
        line.still_since -= 3600
        assert await told(server) == (200, "engine 0: paused (in_place)\n")
        await http.post("/continue_generation", json={})
        assert await told(server) == (200, ""), "what it said before counts no more"
        server.engine.emit(Alive(stands_still=True))
        assert await told(server) == (503, "engine 0: stands still\n"), "nobody has asked for it"
        server.engine.emit(Alive(stands_still=False))
        assert await told(server) == (200, "")
        await http.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
        server.engine.emit(Alive(stands_still=True))
        line.still_since -= 3600
        assert await told(server) == (200, "engine 0: memory released\n")
        ranks = (await http.get("/server_info")).json()["ranks"]
        assert ranks[0]["idle_s"] > 3600

    serve(scenario)


def test_health_can_be_told_to_answer_for_the_frontend_alone(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.http.get("/health")).status_code == 200
        assert server.engine.submitted == []
        assert (await server.http.get("/health_generate")).status_code == 200
        assert len(server.engine.submitted) == 1

    serve(scenario, health_generates=False)


def test_a_server_that_is_starting_or_stopping_is_not_healthy(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        server.service.engine.shutdown()
        assert server.engine.is_shut_down
        assert (await server.http.get("/health")).status_code == 503
        assert (await server.http.post("/generate", json={"text": "a"})).status_code == 503

    serve(scenario)


def test_an_engine_that_cannot_start_says_why(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        server.engine.emit(Failed("no memory for one page"))
        assert not await server.line.wait_ready(timeout_s=1)
        assert server.line.life.failed == Failed("no memory for one page")

    serve(scenario)
