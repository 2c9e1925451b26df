"""The routes that control a running engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from setpoint.core.control import PauseMode
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]


def slow() -> FakeEngine:
    return FakeEngine(script=lambda request: list(b"x" * 200), step_s=0.002)


@pytest.mark.parametrize("mode", list(PauseMode))
def test_pause_and_continue(serve: Serve, mode: PauseMode) -> None:
    async def scenario(server: Any) -> None:
        before = asyncio.create_task(
            server.generate(text="abc", sampling_params={"max_new_tokens": 30})
        )
        while not server.engine.running:
            await asyncio.sleep(0.001)
        response = await server.http.post("/pause_generation", json={"mode": mode})
        assert response.status_code == 200
        answer = response.json()
        assert answer["message"] == "Generation paused successfully."
        assert answer["status"] == "ok"
        during = asyncio.create_task(
            server.generate(text="abc", sampling_params={"max_new_tokens": 3})
        )
        await asyncio.sleep(0.02)
        assert not during.done()
        assert before.done() == (mode is PauseMode.ABORT)
        (load,) = (await server.http.get("/v1/loads")).json()["loads"]
        assert load["num_paused_reqs"] == (1 if mode is PauseMode.ABORT else 2)
        assert (await server.http.get("/health_generate")).status_code == 200
        assert (await server.http.get("/ready")).status_code == 200
        flushed = await server.http.post("/flush_cache?timeout=0.2")
        assert flushed.status_code == (200 if mode is PauseMode.RETRACT else 400)
        response = await server.http.post("/continue_generation", json={})
        assert response.json() == {
            "message": "Generation continued successfully.",
            "status": "ok",
        }
        assert (await during)["text"] == "xxx"
        reason = (await before)["meta_info"]["finish_reason"]
        assert reason["type"] == ("abort" if mode is PauseMode.ABORT else "length")

    serve(scenario, slow(), server_info={"version": "1"})


def test_a_paused_server_without_requests_is_healthy(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        await server.http.post("/pause_generation", json={})
        assert server.engine.paused is PauseMode.ABORT
        assert (await server.http.get("/health")).status_code == 200
        assert not server.engine.submitted, "a probe would wait for the end of the pause"
        await server.http.post("/continue_generation", json={"torch_empty_cache": False})

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/pause_generation", {"mode": "softly"}, "mode"),
        ("/pause_generation", {"mode": 3}, "mode"),
        ("/pause_generation", {"mode": None}, "mode"),
        ("/pause_generation", [], "object"),
        ("/continue_generation", {"torch_empty_cache": "x"}, "torch_empty_cache"),
    ],
)
def test_a_wrong_body_is_refused(serve: Serve, path: str, body: Any, words: str) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(path, json=body)
        assert response.status_code == 400
        assert words in response.json()["message"]
        assert server.engine.paused is None

    serve(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_aborted_before_it_began_has_an_answer_too(serve: Serve, stream: bool) -> None:
    """An aborted request is no error, as in SGLang: its answer is empty, with the reason."""

    async def scenario(server: Any) -> None:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 200}, "stream": stream}
        posts = [asyncio.create_task(server.http.post("/generate", json=body)) for _ in range(3)]
        while len(server.engine.submitted) < 3:
            await asyncio.sleep(0.001)
        assert (
            await server.http.post("/abort_request", json={"abort_all": True})
        ).status_code == 200
        for answer in await asyncio.gather(*posts):
            assert answer.status_code == 200
            assert '"finish_reason":{"type":"abort"' in answer.text

    serve(scenario, FakeEngine(max_running=1, step_s=0.002))
