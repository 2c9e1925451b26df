"""Information, control, auth, CORS, request logs, and clients or engines that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from setpoint.core.errors import EngineDeadError
from setpoint.core.messages import Finish, TokenEvent, Tokens
from setpoint.core.request import RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.jobs import ClientGoneError
from setpoint.frontend.warm_up import warm_up
from setpoint_testing.byte_tokenizer import EOS_ID
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def slow(**options: Any) -> FakeEngine:
    return FakeEngine(script=lambda request: list(b"x" * 200), step_s=0.005, **options)


async def call_and_leave(
    app: Any, path: str, body: dict[str, Any], *, after: int
) -> list[dict[str, Any]]:
    """A raw ASGI call whose client disconnects once ``after`` body chunks have come (0: while it
    waits)."""
    sent: list[dict[str, Any]] = []
    enough = asyncio.Event()
    requests = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if sum(item["type"] == "http.response.body" for item in sent) >= after:
            enough.set()

    if after == 0:
        asyncio.get_running_loop().call_later(0.05, enough.set)
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST", "path": path,
             "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"", "server": ("t", 80), "client": ("t", 1),
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), 5)
    return sent


@pytest.mark.parametrize("path", ["/generate", CHAT, "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_sequences(serve: Serve, path: str, stream: bool) -> None:
    async def scenario(server: Any) -> None:
        body = {
            "stream": stream,
            "n": 2,
            "messages": HI,
            "prompt": "a",
            "text": "a",
            "max_tokens": 200,
            "sampling_params": {"n": 2},
        }
        sent = await call_and_leave(server.app, path, body, after=3 if stream else 0)
        assert sorted(server.engine.stopped) == sorted(
            request.rid for request in server.engine.submitted
        )
        assert not server.engine.running
        assert server.service.events.book.num_aborted == 2
        if not stream:
            assert sent[0]["status"] == 499

    serve(scenario, slow())


def test_a_client_that_leaves_before_the_first_token(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        server.engine.silent = True
        sent = await call_and_leave(server.app, CHAT, {"messages": HI, "stream": True}, after=0)
        assert sent[0]["status"] == 499
        assert len(server.engine.stopped) == 1

    serve(scenario)


def test_the_death_of_the_engine_ends_everything(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        http = server.http
        waiting = [
            asyncio.create_task(http.post("/generate", json={"text": "a"})),
            asyncio.create_task(http.post(CHAT, json={"messages": HI})),
            asyncio.create_task(http.post(CHAT, json={"messages": HI, "stream": True})),
            asyncio.create_task(http.post("/generate", json={"text": "a", "stream": True})),
        ]
        while (
            len(server.engine.running) < 4
            or min(running.num_sent for running in server.engine.running.values()) < 3
        ):
            await asyncio.sleep(0.005)
        server.engine.silent = True
        server.line.died("exit code -9")
        native, chat, chat_stream, native_stream = await asyncio.gather(*waiting)
        assert (native.status_code, native.json()["type"], native.json()["message"]) == (
            503,
            "ServiceUnavailableError",
            "exit code -9",
        )
        assert (chat.status_code, chat.json()["code"], chat.json()["object"]) == (503, 503, "error")
        error = json.loads(chat_stream.text.strip().split("\n\n")[-2].removeprefix("data: "))[
            "error"
        ]
        assert (error["code"], error["type"]) == (None, "server_error")
        error = json.loads(native_stream.text.strip().split("\n\n")[-2].removeprefix("data: "))[
            "error"
        ]
        assert error == {
            "message": "exit code -9",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": None,
        }
        for path in ("/health", "/health_generate", "/ready", "/ping", "/server_info"):
            assert (await http.get(path)).status_code == 503, path
        assert (await http.post("/generate", json={"text": "a"})).status_code == 503
        assert server.service.events.book.num_aborted == 4
        server.engine.running.clear()

    serve(scenario, slow())


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa4type\xa3???", b"\x93\x01\x02\x03"])
def test_an_engine_that_sends_garbage_is_not_trusted_any_more(serve: Serve, data: bytes) -> None:
    async def scenario(server: Any) -> None:
        asked = asyncio.create_task(
            server.http.post(
                "/generate", json={"text": "a" * 50, "sampling_params": {"max_new_tokens": 200}}
            )
        )
        while not server.engine.running:
            await asyncio.sleep(0)
        server.engine._receiver(data)
        answer = await asked
        assert answer.status_code == 503
        assert "that cannot be read" in answer.json()["error"]["message"]
        assert (await server.http.get("/ready")).status_code == 503
        server.engine.running.clear()

    serve(scenario, slow())


def test_information(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for path in ("/model_info", "/get_model_info"):
            info = (await server.http.get(path)).json()
            assert (info["model_path"], info["tokenizer_path"], info["is_generation"]) == (
                "org/tiny",
                "/models/tiny",
                True,
            )
            assert info["model_type"] == "llama"
        for path in ("/server_info", "/get_server_info"):
            info = (await server.http.get(path)).json()
            assert (info["page_size"], info["max_req_input_len"]) == (16, 256)
            (state,) = info["internal_states"]
            assert (state["num_queued"], state["num_running"]) == (0, 0)
            assert (state["pool"]["total"], state["pool"]["free"]) == (1000, 1000)
        assert (await server.http.get("/")).status_code == 200

    serve(scenario, model_info={"model_type": "llama"}, server_info={"page_size": 16})


def test_flush_cache_waits_for_idle_if_asked(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.http.get("/flush_cache")).text.startswith("Cache flushed.")
        server.engine.max_running = 0
        busy = asyncio.create_task(
            server.generate(text="a", sampling_params={"max_new_tokens": 30})
        )
        while not server.engine.running:
            await asyncio.sleep(0)
        assert (await server.http.post("/flush_cache")).status_code == 400
        first = asyncio.create_task(server.http.post("/flush_cache?timeout=60"))
        for _ in range(200):  # turns of the loop, for it to get there
            await asyncio.sleep(0)
        second = await server.http.post("/flush_cache?timeout=nan")
        assert (second.status_code, second.text) == (
            400,
            "Another flush_cache is already in progress.\n",
        )
        server.engine.max_running = 10
        assert (await first).status_code == 200
        await busy

    serve(scenario, slow())


def test_api_key(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        http = server.http
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secrét"},
            {"authorization": "Basic secret"},
        ):
            response = await http.get(
                "/v1/models", headers={key: value.encode() for key, value in headers.items()}
            )
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
            assert "'Authorization: Bearer KEY'" in response.json()["error"]["message"]
        assert (
            await http.get("/v1/models", headers={"authorization": "Bearer secret"})
        ).status_code == 200
        assert [model.id async for model in server.openai.models.list()] == ["org/tiny"]
        for path in ("/health", "/health_generate", "/ready"):
            assert (await http.get(path)).status_code == 200
        browser = {"origin": "http://page", "access-control-request-method": "POST"}
        assert (await http.options("/generate", headers=browser)).status_code == 200
        assert (await http.post("/flush_cache")).status_code == 401

    serve(scenario, api_key="secret")


def test_cors_allows_all_origins(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.get("/v1/models", headers={"origin": "http://page"})
        assert response.headers["access-control-allow-origin"] in ("*", "http://page")

    serve(scenario)


def test_warm_up_runs_a_request(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        await warm_up(server.service.answering)
        assert server.engine.submitted[0].sampling.max_new_tokens == 8
        assert server.service.events.book.num_sequences == 0
        server.engine.silent = True
        with pytest.raises(EngineDeadError):
            await warm_up(server.service.answering, timeout_s=0.05)

    serve(scenario)


def test_request_logs_by_level(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    shown: dict[int, list[str]] = {}

    async def scenario(server: Any) -> None:
        await server.generate(text="p" * 100, sampling_params={"max_new_tokens": 3, "top_p": 0.5})
        await server.generate(text="unseen", no_logs=True, sampling_params={"max_new_tokens": 1})
        await server.http.post(CHAT, json={"messages": HI, "max_tokens": 2})

    for level in range(4):
        caplog.clear()
        serve(scenario, FakeEngine(), log_requests=True, log_requests_level=level)
        shown[level] = [
            message for message in caplog.messages if message.startswith(("Receive", "Finish"))
        ]
    assert [line.split("=")[0] for line in shown[2]] == [
        "Receive: obj",
        "Finish: obj",
        "Receive OpenAI: obj",
        "Finish: obj",
    ]
    for level, lines in shown.items():
        assert ("top_p" in lines[0]) == (level >= 1)
        assert ("ppp" in lines[0]) == (level >= 2)
        assert "finish_reason" in lines[1]


def test_concurrent_streams_do_not_mix(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        async def one(index: int) -> str:
            stream = await server.openai.completions.create(
                model="m", prompt=f"<{index}>", max_tokens=8, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(one(index) for index in range(64)))
        assert texts == [(f"<{index}>" * 8)[:8] for index in range(64)]

    serve(scenario, FakeEngine(eos_ids=frozenset({EOS_ID})))


def test_a_cancelled_job_never_ends_as_a_success(serve: Serve) -> None:
    """The disconnect may come between the arrival of tokens and their reading."""

    async def scenario(server: Any) -> None:
        service = server.service
        prompt = await service.answering.intake.encode("a")
        with service.answering.jobs.make(
            service.answering.intake.requests(prompt, SamplingParams(), RequestOptions(), rid="r"),
            received={},
        ) as job:
            reader = asyncio.create_task(job.wait())
            await asyncio.sleep(0)
            server.engine.emit(
                Tokens([TokenEvent(0, [97], Finish("length", length=1), num_outputs=1)])
            )
            server.engine.running.clear()  # it has ended there
            job.cancel()
            with pytest.raises(ClientGoneError):
                await reader
        assert service.events.book.num_sequences == 1

    serve(scenario, slow())
