"""Sessions: a request goes on from any finished one and sends only what is new."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from setpoint.core.messages import Finish
from setpoint.frontend import sessions
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
WARM = {"max_new_tokens": 3}


def counting() -> FakeEngine:
    """Answers 100, 101, 102, …"""
    return FakeEngine(script=lambda request: [100, 101, 102])


async def opened(server: Any, **body: Any) -> str:
    response = await server.http.post("/open_session", json={"capacity_of_str_len": 1000} | body)
    assert response.status_code == 200, response.text
    return str(response.json())


async def ask(server: Any, session: str, ids: list[int] | str, **params: Any) -> list[int]:
    """Generate three tokens; returns the prompt that the engine saw. ``rid`` in params is that of
    the session's request, ``own`` the request's."""
    response = await post(server, session, ids, **params)
    assert response.status_code == 200, response.text
    return [int(token) for token in server.engine.submitted[-1].prompt()]


async def post(server: Any, session: str, ids: list[int] | str, **params: Any) -> Any:
    prompt = {"text": ids} if isinstance(ids, str) else {"input_ids": ids}
    own = {"rid": params.pop("own")} if "own" in params else {}
    body = prompt | own | {"session_params": {"id": session, **params}, "sampling_params": WARM}
    return await server.http.post("/generate", json=body)


OUT = [100, 101, 102]


def test_the_prompt_of_a_turn(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        session = await opened(server)
        assert await ask(server, session, [1, 2, 3], own="a") == [1, 2, 3]
        first = [1, 2, 3, *OUT]
        assert await ask(server, session, [4], rid="a", own="b") == [*first, 4]
        assert await ask(server, session, [5], rid="b", own="c") == [*first, 4, *OUT, 5]
        assert await ask(server, session, [6], rid="a", own="d") == [*first, 6], "branches"
        assert await ask(server, session, [7], rid="a", offset=2) == [1, 2, 7]
        assert await ask(server, session, [7], rid="a", offset=-1) == [*first[:-1], 7]
        assert await ask(server, session, [7], rid="a", offset=0) == [*first, 7]
        assert await ask(server, session, [7], rid="a", drop_previous_output=True) == [1, 2, 3, 7]
        assert await ask(server, session, "hi", rid="a") == [*first, *b"hi"]
        assert await ask(server, session, [8]) == [8], "a second root"

    serve(scenario, counting())


def test_replacing(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        session = await opened(server)
        await ask(server, session, [1], own="a")
        await ask(server, session, [2], rid="a", own="b")
        await ask(server, session, [3], rid="b", own="c")
        await ask(server, session, [4], own="other")
        assert await ask(server, session, [5], rid="a", own="d", replace=True) == [1, *OUT, 5]
        for gone in ("b", "c"):
            response = await post(server, session, [6], rid=gone)
            assert response.status_code == 400
            assert f"has no finished request {gone}" in response.json()["message"]
        await ask(server, session, [6], rid="other")
        await ask(server, session, [7], own="new", replace=True)
        for gone in ("a", "d", "other"):
            assert (await post(server, session, [6], rid=gone)).status_code == 400
        await ask(server, session, [8], rid="new")

    serve(scenario, counting())


def test_ids_of_sessions(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        http = server.http
        assert await opened(server, session_id="mine") == "mine"
        again = await http.post(
            "/open_session", json={"capacity_of_str_len": 5, "session_id": "mine"}
        )
        assert again.status_code == 400
        assert (await http.post("/close_session", json={"session_id": "mine"})).status_code == 200
        for response in (
            await http.post("/close_session", json={"session_id": "mine"}),
            await post(server, "mine", [1]),
        ):
            assert response.status_code == 400
            text = "Invalid request: session id mine does not exist"
            assert response.json()["message"] == text

    serve(scenario, counting())


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/open_session", {}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": 0}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": "many"}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": 5, "streaming": True}, "streaming"),
        ("/open_session", {"capacity_of_str_len": 5, "timeout": -1}, "timeout"),
        ("/open_session", {"capacity_of_str_len": 5, "session_id": "a\nb"}, "session_id"),
        ("/open_session", {"capacity_of_str_len": 5, "session_id": ""}, "session_id"),
        ("/close_session", {"session_id": None}, "session_id"),
        ("/generate", {"session_params": {"rid": "a"}}, "id"),
        ("/generate", {"session_params": "mine"}, "session_params"),
        ("/generate", {"session_params": {"id": "mine", "offset": "x"}}, "offset"),
        ("/generate", {"session_params": {"id": "mine", "offset": 1 << 70}}, "offset"),
        ("/generate", {"session_params": {"id": "mine"}, "sampling_params": {"n": 2}}, "n = 1"),
        ("/generate", {"session_params": {"id": "mine"}, "text": ["a", "b"]}, "a single prompt"),
        ("/generate", {"session_id": "radix"}, "session_id"),
    ],
)
def test_wrong_bodies_are_refused(
    serve: Serve, path: str, body: dict[str, Any], words: str
) -> None:
    async def scenario(server: Any) -> None:
        await opened(server, session_id="mine")
        given = {"text": "x"} | body if path == "/generate" else body
        response = await server.http.post(path, json=given)
        assert response.status_code == 400
        assert words in response.json()["message"]
        assert not server.engine.submitted

    serve(scenario, counting())


def test_what_is_under_way_or_failed_cannot_be_gone_on_from(serve: Serve) -> None:
    def refuse(request: Any) -> Finish | None:
        full = request.rid == "refused"
        return Finish("abort", message="full", status_code=503) if full else None

    async def scenario(server: Any) -> None:
        session = await opened(server)
        await ask(server, session, [1], own="a")
        server.engine.silent = True
        running = asyncio.create_task(post(server, session, [2], rid="a", own="b"))
        while len(server.engine.submitted) < 2:
            await asyncio.sleep(0)
        assert (await post(server, session, [3], rid="b")).status_code == 400
        server.engine.silent = False
        server.engine._tick_later()
        assert (await running).status_code == 200
        assert (await post(server, session, [3], own="refused", replace=True)).status_code == 503
        assert (await post(server, session, [3], rid="refused")).status_code == 400
        assert (await post(server, session, [3], own="b")).status_code == 400, "a rid twice"
        await ask(server, session, [3], rid="b")  # nothing was replaced

    serve(scenario, FakeEngine(script=lambda request: OUT, refuse=refuse))


def test_sessions_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    monkeypatch.setattr(sessions, "MAX_BYTES", 2000)

    async def scenario(server: Any) -> None:
        small = await opened(server, capacity_of_str_len=10)
        await ask(server, small, [1, 2, 3, 4], own="a")
        full = await post(server, small, [5], rid="a")
        assert full.status_code == 400
        assert "capacity_of_str_len is 10" in full.json()["message"]
        large = await opened(server)
        await ask(server, large, [1] * 150)
        refused = await post(server, large, [1] * 150)
        assert refused.status_code == 503
        assert "take too much memory" in refused.json()["message"]
        await opened(server)
        body = {"capacity_of_str_len": 5}
        assert (await server.http.post("/open_session", json=body)).status_code == 503
        await server.http.post("/close_session", json={"session_id": large})
        await ask(server, await opened(server), [1] * 150)

    serve(scenario, counting())


def test_many_short_requests_with_long_names_are_bounded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_BYTES", 20_000)

    async def scenario(server: Any) -> None:
        session = await opened(server)
        statuses = [
            (await post(server, session, [1], own=f"{index:0200}")).status_code
            for index in range(50)
        ]
        assert statuses == sorted(statuses), "200, and from some request on 503"
        assert 20 < statuses.count(200) < 40
        await server.http.post("/close_session", json={"session_id": session})
        await ask(server, await opened(server), [1])

    serve(scenario, counting())


def test_requests_under_way_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_BYTES", 20_000)
    book = sessions.Sessions()
    params = sessions.SessionParams(book.open(None, capacity=100_000, timeout_s=None))
    prompt = sessions.np.ones(1000, "i4")
    turns = [book.turn(params, prompt, rid=str(index)) for index in range(4)]
    with pytest.raises(sessions.RequestError, match="take too much memory"):
        book.turn(params, prompt, rid="one more")
    del turns[0]
    book.turn(params, prompt, rid="one more")


def test_an_idle_session_is_closed() -> None:
    now = 0.0
    book = sessions.Sessions(lambda: now)
    short = book.open(None, capacity=100, timeout_s=5.0)
    usual = book.open(None, capacity=100, timeout_s=None)
    now = 4.0
    turn = book.turn(sessions.SessionParams(short), sessions.np.array([1], "i4"), rid="a")
    now = 100.0
    assert book.turn(sessions.SessionParams(short), turn.prompt, rid="b"), "one is under way"
    del turn
    now = 106.0
    with pytest.raises(sessions.RequestError, match="does not exist"):
        book.close(short)
    book.close(usual)


def test_a_client_that_leaves_keeps_what_it_got(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        session = await opened(server)
        body = {
            "input_ids": [1],
            "rid": "a",
            "stream": True,
            "session_params": {"id": session},
            "sampling_params": {"max_new_tokens": 100},
        }
        async with server.http.stream("POST", "/generate", json=body) as response:
            async for line in response.aiter_lines():
                if "output_ids" in line:
                    break
        prompt = await ask(server, session, [9], rid="a")
        assert prompt[0] == 1
        assert prompt[-1] == 9

    serve(scenario, FakeEngine(script=lambda request: OUT, step_s=0.001))


def slow() -> FakeEngine:
    """Answers 100, 101, 102, 100, … without an end, some milliseconds apart."""
    return FakeEngine(script=lambda request: OUT, step_s=0.002)


async def running(server: Any, session: str, own: str, **params: Any) -> asyncio.Task[Any]:
    """A request of the session that has some outputs, and would run for long."""
    body = {
        "input_ids": [5],
        "rid": own,
        "session_params": {"id": session, **params},
        "sampling_params": {"max_new_tokens": 200},
    }
    task = asyncio.create_task(server.http.post("/generate", json=body))
    while own not in {each.request.rid for each in server.engine.running.values() if each.num_sent}:
        await asyncio.sleep(0.001)
    return task


def test_replacing_a_running_request_goes_on_from_what_it_has(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        session = await opened(server)
        await ask(server, session, [1], own="a")
        first = await running(server, session, "b", rid="a")
        child = await running(server, session, "other", rid="a")
        prompt = await ask(server, session, [6], own="c", rid="b", replace=True)
        ended = (await first).json()
        assert ended["meta_info"]["finish_reason"]["type"] == "abort"
        outputs = ended["output_ids"]
        assert 0 < len(outputs) < 200
        assert prompt == [1, *OUT, 5, *outputs, 6]
        assert not child.done(), "it does not descend from the replaced one"
        below = await running(server, session, "d", rid="c")
        prompt = await ask(server, session, [7], own="e", rid="b", replace=True, offset=2)
        assert prompt == [1, 100, 7]
        assert (await below).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await post(server, session, [8], rid="d")).status_code == 400
        assert not child.done()
        assert await ask(server, session, [9], own="f", replace=True) == [9]
        assert (await child).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await post(server, session, [8], rid="a")).status_code == 400

    serve(scenario, slow())


def test_a_long_body_may_replace_too(serve: Serve) -> None:
    """It is worked on in a thread."""

    async def scenario(server: Any) -> None:
        session = await opened(server, capacity_of_str_len=1_000_000)
        first = await running(server, session, "b")
        prompt = await ask(server, session, [6] * 60_000, own="c", rid="b", replace=True)
        outputs = (await first).json()["output_ids"]
        assert prompt[: len(outputs) + 1] == [5, *outputs]

    engine = slow()
    engine.context_len = 1 << 20
    serve(scenario, engine)


def test_a_request_that_cannot_be_ended_cannot_be_replaced(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "END_S", 0.05)

    async def scenario(server: Any) -> None:
        session = await opened(server)
        first = await running(server, session, "b")
        server.engine.silent = True
        refused = await post(server, session, [6], rid="b", replace=True)
        assert refused.status_code == 503
        assert "b does not end" in refused.json()["message"]
        server.engine.silent = False
        server.engine._tick_later()
        assert (await first).status_code == 200

    serve(scenario, slow())
