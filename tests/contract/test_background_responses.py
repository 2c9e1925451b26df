"""Responses in the background: their events at any later time, and what a server leaves to the next
one with the same folder, wherever it was ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from answers import says
from background_responses import (
    OPTIONS,
    ROOM,
    ROUTE,
    TEXTS,
    begun,
    body_of,
    copied,
    ended,
    engine_of,
    events_after,
    events_of,
    server_on,
    timeless,
    until,
)

from conftest import serving
from setpoint.frontend.apis.openai.responses.background import Background
from setpoint.frontend.storage.storage import Storage
from setpoint_testing.byte_tokenizer import EOS_ID
from setpoint_testing.fake_engine import FakeEngine


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
def test_a_stream_begins_again_after_any_event(name: str, tokens_per_event: int) -> None:
    async def main() -> None:
        engine = engine_of(name, tokens_per_event=tokens_per_event)
        async with serving(engine, **OPTIONS) as server:
            events = await events_of(server, ROUTE, body_of(name, stream=True))
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            kinds = [event["type"].removeprefix("response.") for event in events]
            assert kinds[:3] == ["created", "queued", "in_progress"]
            assert [event["response"]["status"] for event in events[:3]] == [
                "queued",
                "queued",
                "in_progress",
            ]
            own_id, last = events[0]["response"]["id"], events[-1]["response"]
            assert last == (await server.http.get(f"{ROUTE}/{own_id}")).json()
            done = [event["item"] for event in events if event["type"].endswith("item.done")]
            assert done == last["output"]
            for after in range(len(events) + 2):
                assert await events_after(server, own_id, after) == events[after + 1 :]
            assert await events_after(server, own_id) == events
            whole = await server.http.post(ROUTE, json=body_of(name, background=False))
            assert timeless(whole.json()["output"]) == timeless(last["output"])

    asyncio.run(main())


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", TEXTS)
def test_killed_at_any_moment_a_response_goes_on(name: str, tmp_path: Path) -> None:
    """The folder is copied after each event, as a server that is killed then would leave it."""

    async def main() -> None:
        engine = engine_of(name, num_cached=3, step_s=0.004)
        async with server_on(tmp_path / "first", engine) as server:
            copies = 0
            own_id = await begun(server, body_of(name))
            response = server.service.answering.responses.background.responses[own_id]
            while not response.has_ended:
                await copied(server, tmp_path / "first", tmp_path / str(copies))
                copies += 1
                if not response.has_ended:
                    await response.wait_until_shown()
            expected = await events_after(server, own_id)
        assert copies > 1  # fewer than there are events where others keep the machine busy
        for copy in {*range(0, copies, max(copies // 4, 1)), copies - 1}:
            engine = engine_of(name, num_cached=5, tokens_per_event=2)
            async with server_on(tmp_path / str(copy), engine) as server:
                found = server.service.answering.responses.background.responses[own_id]
                before, had_ended = found.num_shown, found.has_ended
                last = await ended(server, own_id)
                events = await events_after(server, own_id)
                priors = [len(each.prior_outputs()) for each in engine.submitted]
                assert priors == ([] if had_ended else [before])
                if before:
                    assert timeless(last) == timeless(expected[-1]["response"])
                for old, new in zip(expected[:-1], events[:-1], strict=True):
                    assert old == new
                for after in range(0, len(events), 5):
                    assert await events_after(server, own_id, after) == events[after + 1 :]
        async with server_on(tmp_path / str(copy), engine_of(name)) as server:
            assert (await server.http.get(f"{ROUTE}/{own_id}")).json() == last
            assert await events_after(server, own_id) == events

    asyncio.run(main())


def test_a_seed_is_drawn_once(tmp_path: Path) -> None:
    async def main() -> None:
        engine = says("Hello", context_len=ROOM, silent=True)
        async with server_on(tmp_path / "a", engine) as server:
            own_id = await begun(server, body_of("plain"))
            await until(lambda: engine.submitted)
            await copied(server, tmp_path / "a", tmp_path / "b")
            response = server.service.answering.responses.background.responses[own_id]
            response.task.cancel()
        again = says("Hello", context_len=ROOM)
        async with server_on(tmp_path / "b", again, random_seed=77) as server:
            assert (await ended(server, own_id))["status"] == "completed"
        assert again.submitted == engine.submitted

    asyncio.run(main())


def test_a_server_that_is_asked_to_end_leaves_its_responses_to_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        first: list[Any] = []
        async with server_on(tmp_path, engine_of("cut", step_s=0.002)) as server:
            own_id = await begun(server, body_of("cut"))
            response = server.service.answering.responses.background.responses[own_id]
            following = asyncio.create_task(events_after(server, own_id))
            await until(lambda: response.num_shown > 5)
        first = await following
        assert first[-1]["type"] == "error"
        assert "starting_after" in first[-1]["message"]
        last = first[-1]["sequence_number"]
        assert last == first[-2]["sequence_number"]
        assert response.stored.num_tries == 0
        async with server_on(tmp_path, engine_of("cut")) as server:
            rest = await events_after(server, own_id, last)
            assert first[:-1] + rest == await events_after(server, own_id)
            assert rest[-1]["response"]["status"] == "incomplete"
        lines = [each.getMessage() for each in caplog.records if each.name != "httpx"]
        post, *told = [line for line in lines if "in the background" in line]
        assert '"POST /v1/responses ' in post, post
        assert post.endswith("output 0, in the background"), post
        goes_on = "1 response in the background goes on"
        assert told == [
            f"{goes_on} when a server with this --file-storage-path starts again.",
            f"{goes_on} where an earlier server has stopped.",
            f"Response {own_id} in the background has ended: incomplete, output 40",
        ]

    asyncio.run(main())


def test_the_end_of_the_last_engine_leaves_responses_to_the_next_server(tmp_path: Path) -> None:
    async def main() -> None:
        silent = says("Hello", context_len=ROOM, silent=True)
        async with server_on(tmp_path, silent) as server:
            own_id = await begun(server, body_of("plain"))
            await until(lambda: silent.submitted)
            following = asyncio.create_task(events_after(server, own_id))
            server.line.died("The engine has crashed.")
            events = await following
            assert [event["type"] for event in events] == [
                "response.created",
                "response.queued",
                "error",
            ]
            assert events[-1]["message"].startswith(
                "The engine has crashed. The response continues"
            )
        async with server_on(tmp_path, says("Hello", context_len=ROOM)) as server:
            assert (await ended(server, own_id))["status"] == "completed"
        async with serving(silent) as server:
            own_id = await begun(server, body_of("plain"))
            server.line.died("The engine has crashed.")
            failed = await ended(server, own_id)
            assert failed["error"]["message"] == "The engine has crashed."

    asyncio.run(main())


def with_tries(folder: Path, tries: dict[str, int]) -> None:
    with closing(Storage(folder)) as storage:
        for own_id, count in tries.items():
            storage.background.responses[own_id].change(num_tries=count)
            document = storage.background.responses[own_id].stored
            storage._documents.put("response", document)


def test_a_response_that_ends_its_servers_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Responses that may have ended the server before run one after the other, and the one that has
    seen the most servers end does so first."""

    async def main() -> None:
        silent = says("Hello", context_len=ROOM, silent=True)
        async with server_on(tmp_path / "a", silent) as server:
            ids = [await begun(server, body_of("plain")) for _ in range(5)]
            await until(lambda: len(silent.submitted) == 5)
            await copied(server, tmp_path / "a", tmp_path / "b")
        with_tries(tmp_path / "b", dict(zip(ids, (1, 2, 3, 2, 1), strict=True)))
        engine = says("Hello", context_len=ROOM, silent=True)
        async with server_on(tmp_path / "b", engine) as server:
            failed = await ended(server, ids[2])
            assert failed["error"]["code"] == "server_error"
            assert "3 servers in turn ended while they computed it" in failed["error"]["message"]
            assert (await events_after(server, ids[2]))[-1]["response"] == failed
            await until(lambda: engine.submitted)
            for _ in range(100):
                await asyncio.sleep(0)
            assert [each.rid for each in engine.submitted] == [ids[1]]
            await copied(server, tmp_path / "b", tmp_path / "c")
            engine.silent = False
            engine._tick_later()
            for own_id in ids[:2] + ids[3:]:
                assert (await ended(server, own_id))["status"] == "completed"
            assert [each.rid for each in engine.submitted] == [ids[1], ids[3], ids[0], ids[4]]
        async with server_on(tmp_path / "c", says("Hello", context_len=ROOM)) as server:
            assert "3 servers in turn" in (await ended(server, ids[1]))["error"]["message"]
            assert (await ended(server, ids[3]))["status"] == "completed"

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "is not tried again: 3 servers in turn ended" in caplog.text


def test_another_model_does_not_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        silent = says("Hello", context_len=ROOM, silent=True)
        async with server_on(tmp_path / "a", silent) as server:
            own_id = await begun(server, body_of("plain"))
            await until(lambda: silent.submitted)
            await copied(server, tmp_path / "a", tmp_path / "b")
        async with server_on(tmp_path / "a", says("x"), model_path="org/other") as server:
            failed = await ended(server, own_id)
            assert "begun with the weights org/tiny" in failed["error"]["message"]
        async with server_on(tmp_path / "b", says("x"), tokenizer_path="/else") as server:
            failed = await ended(server, own_id)
            assert "this server has /else" in failed["error"]["message"]
            refused = await server.http.get(f"{ROUTE}/{own_id}?stream=true")
            assert refused.status_code == 400

    asyncio.run(main())


def test_cancelled_and_deleted_responses_stay_so(tmp_path: Path) -> None:
    async def main() -> None:
        engine = engine_of("cut", step_s=0.005)
        body = body_of("cut", max_output_tokens=3000)
        async with server_on(tmp_path / "a", engine) as server:
            ids = [await begun(server, body) for _ in range(3)]
            responses = server.service.answering.responses.background.responses
            await until(lambda: all(responses[each].num_shown > 3 for each in ids))
            deleted = asyncio.create_task(events_after(server, ids[1]))
            cancelled = (await server.http.post(f"{ROUTE}/{ids[0]}/cancel")).json()
            assert cancelled["status"] == "cancelled"
            assert cancelled["usage"]["output_tokens"] > 3
            assert (await server.http.delete(f"{ROUTE}/{ids[1]}")).json()["deleted"]
            assert (await deleted)[-1]["message"].startswith("The response was deleted.")
            await copied(server, tmp_path / "a", tmp_path / "b")
        async with server_on(tmp_path / "b", engine_of("cut", step_s=0.005)) as server:
            assert (await server.http.get(f"{ROUTE}/{ids[0]}")).json() == cancelled
            events = await events_after(server, ids[0])
            assert events[-1] == {
                "type": "response.cancelled",
                "response": cancelled,
                "sequence_number": len(events) - 1,
            }
            assert (await server.http.get(f"{ROUTE}/{ids[1]}")).status_code == 404
            third = (await server.http.post(f"{ROUTE}/{ids[2]}/cancel")).json()
            assert "status" in third, third
            assert (third["status"], third["output"][0]["status"]) == ("cancelled", "incomplete")
            events = await events_after(server, ids[2])
            done = [event["item"] for event in events if event["type"].endswith("item.done")]
            assert done == third["output"]
            assert not server.engine.running
        assert not list((tmp_path / "b" / "responses").iterdir())

    asyncio.run(main())


def test_cancelled_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: a request that was being handled when the task was made cancelled it before it
    ran, so that nothing was stored, and the answer was 507."""
    cancelling: list[asyncio.Task[None]] = []
    start = Background._start

    def cancel_and_start(self: Background, response: Any, work: Any) -> None:
        cancelling.append(asyncio.create_task(self.cancel(response)))
        start(self, response, work)

    async def main() -> None:
        async with server_on(tmp_path / "a", engine_of("cut")) as server:
            monkeypatch.setattr(Background, "_start", cancel_and_start)
            own_id = await begun(server, body_of("cut"))
            await asyncio.gather(*cancelling)
            found = (await server.http.get(f"{ROUTE}/{own_id}")).json()
            assert found["status"] == "cancelled"
            assert not server.engine.running

    asyncio.run(main())


def test_a_conversation_goes_on_with_a_response_of_an_earlier_server(tmp_path: Path) -> None:
    async def main() -> None:
        async with server_on(tmp_path, says("One.", context_len=ROOM)) as server:
            first = await begun(server, body_of("plain", input="1?"))
            await ended(server, first)
            second = await begun(server, body_of("plain", input="2?", previous_response_id=first))
            await ended(server, second)
        async with server_on(tmp_path, says("Three.", context_len=ROOM)) as server:
            items = (await server.http.get(f"{ROUTE}/{second}/input_items?order=asc")).json()
            texts = [item["content"][0]["text"] for item in items["data"]]
            assert texts == ["1?", "One.", "2?"]
            body = {"model": "default", "input": "3?", "previous_response_id": second}
            assert (await server.http.post(ROUTE, json=body)).status_code == 200

    asyncio.run(main())


def test_what_is_dropped_for_newer_ones_leaves_the_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with server_on(tmp_path, says("Hi", context_len=ROOM)) as server:
            server.service.answering.responses._max_responses = 2
            ids = []
            for _ in range(4):
                ids.append(await begun(server, body_of("plain")))
                await ended(server, ids[-1])
            await server.service.answering.responses.background.save()
        with closing(Storage(tmp_path)) as storage:
            assert list(storage.background.responses) == ids[2:]

    asyncio.run(main())


def test_what_cannot_be_streamed_is_refused(serve: Callable[..., None]) -> None:
    async def scenario(server: Any) -> None:
        plain = await server.openai.responses.create(model="default", input="hi")
        ours = await begun(server, body_of("plain"))
        await ended(server, ours)
        for path, why in (
            (f"{plain.id}?stream=true", "was not created with background"),
            (f"{ours}?starting_after=1", "starting_after needs stream=true"),
            (f"{ours}?stream=true&starting_after=-1", "starting_after must be at least 0"),
            (f"{ours}?stream=true&starting_after=x", "starting_after"),
        ):
            answer = await server.http.get(f"{ROUTE}/{path}")
            assert answer.status_code == 400
            assert why in answer.text

    serve(scenario, says("Hello", context_len=ROOM))


def test_openais_client_takes_up_a_stream(serve: Callable[..., None]) -> None:
    async def scenario(server: Any) -> None:
        responses = server.openai.responses
        seen: list[Any] = []
        async with await responses.create(
            model="default", input="hi", background=True, stream=True
        ) as stream:
            async for event in stream:
                seen.append(event)
        own_id = seen[0].response.id
        rest: Sequence[Any] = [
            event async for event in await responses.retrieve(own_id, stream=True, starting_after=4)
        ]
        assert [event.sequence_number for event in rest] == list(range(5, len(seen)))
        assert rest == seen[5:]
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve("resp_none", stream=True)

    serve(scenario, says("Hello there", context_len=ROOM, step_s=0.001))


def test_a_client_that_leaves_ends_its_stream_only(http_url: Callable[..., str]) -> None:
    engine = FakeEngine(
        script=lambda request: [*b"abc", EOS_ID][:3], context_len=ROOM, step_s=0.001
    )
    with openai.OpenAI(base_url=f"{http_url(engine)}/v1", api_key="none") as client:
        stream = client.responses.create(
            model="default", input="hi", background=True, stream=True, max_output_tokens=200
        )
        own_id = next(iter(stream)).response.id
        stream.close()
        events = list(client.responses.retrieve(own_id, stream=True, starting_after=0))
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.usage.output_tokens == 200
