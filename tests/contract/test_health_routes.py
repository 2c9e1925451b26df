"""Health, readiness, and an engine that starts, stops or fails to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from setpoint.core.messages import Announce, Failed
from setpoint.frontend.service import RECENT_S
from setpoint.testing.fake_engine import FakeEngine

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
        assert server.line.failed == Failed("no memory for one page")

    serve(scenario)
