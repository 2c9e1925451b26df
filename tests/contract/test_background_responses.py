"""Responses in the background: their events at any later time, and what a server leaves to the next
one with the same folder, wherever it was ended."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import openai
import pytest
from answers import says

from conftest import serving
from setpoint.core.errors import ConfigError
from setpoint.frontend.storage.storage import Storage
from setpoint.testing.byte_tokenizer import EOS_ID
from setpoint.testing.fake_engine import FakeEngine

ROUTE = "/v1/responses"
ROOM = 4096
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "write"}
TEXTS = {
    "plain": ("Grüße, 世界! \U0001f600 Ende", {}),
    "stopped": ("one two STOP three", {"stop": ["STOP"]}),
    "calls": (
        'See.<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'
        '<tool_call>{"name": "write", "arguments": {"input": "a\\nb"}}</tool_call>',
        {"tools": [TOOL, CUSTOM]},
    ),
    "reasoning": ("<think>Well, é.</think>\n\nYes.", {}),
    "cut": ("No end in sight ", {"max_output_tokens": 40, "ignore_eos": True}),
}
OPTIONS: dict[str, Any] = {"reasoning_parser": "qwen3"}


def body_of(name: str, **more: Any) -> dict[str, Any]:
    return {"model": "default", "input": "hi", "background": True, **TEXTS[name][1], **more}


def engine_of(name: str, **options: Any) -> FakeEngine:
    return says(TEXTS[name][0], context_len=ROOM, **options)


async def events_of(server: Any, path: str, body: Any = None, **query: Any) -> list[Any]:
    """All events of a stream until it ends."""
    method = "GET" if body is None else "POST"
    answer = await server.http.request(method, path, json=body, params=query or None)
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


async def events_after(server: Any, own_id: str, after: int | None = None) -> list[Any]:
    query = {} if after is None else {"starting_after": after}
    return await events_of(server, f"{ROUTE}/{own_id}", stream="true", **query)


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


async def ended(server: Any, own_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            found = (await server.http.get(f"{ROUTE}/{own_id}")).json()
            if found["status"] not in ("queued", "in_progress"):
                return dict(found)
            await asyncio.sleep(0.001)


async def begun(server: Any, body: dict[str, Any]) -> str:
    answer = (await server.http.post(ROUTE, json=body)).json()
    assert answer["status"] == "queued", answer
    return str(answer["id"])


@asynccontextmanager
async def server_on(folder: Path, engine: FakeEngine, **options: Any) -> AsyncIterator[Any]:
    with closing(Storage(folder)) as storage:
        async with serving(engine, storage=storage, **{**OPTIONS, **options}) as server:
            yield server


async def copied(server: Any, folder: Path, copy: Path) -> None:
    """Copy the folder of a server as it is between two writes."""
    await until(lambda: server.service.background._writer.done())
    shutil.copytree(folder, copy)


def timeless(value: Any) -> Any:
    """Without what differs between two runs of the same request: times, and ids."""
    if isinstance(value, dict):
        left_out = ("created_at", "completed_at", "id", "item_id", "call_id")
        return {key: timeless(each) for key, each in value.items() if key not in left_out}
    return [timeless(each) for each in value] if isinstance(value, list) else value


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


@pytest.mark.parametrize("name", TEXTS)
def test_killed_at_any_moment_a_response_goes_on(name: str, tmp_path: Path) -> None:
    """The folder is copied after each event, as a server that is killed then would leave it."""

    async def main() -> None:
        engine = engine_of(name, num_cached=3, step_s=0.004)
        async with server_on(tmp_path / "first", engine) as server:
            copies = 0
            own_id = await begun(server, body_of(name))
            response = server.service.background.responses[own_id]
            while not response.has_ended:
                await copied(server, tmp_path / "first", tmp_path / str(copies))
                copies += 1
                if not response.has_ended:
                    await response.wait_until_shown()
            expected = await events_after(server, own_id)
        assert copies > 4
        for copy in {*range(0, copies, copies // 4), copies - 1}:
            engine = engine_of(name, num_cached=5, tokens_per_event=2)
            async with server_on(tmp_path / str(copy), engine) as server:
                found = server.service.background.responses[own_id]
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
            response = server.service.background.responses[own_id]
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
            response = server.service.background.responses[own_id]
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
    """Those that may have ended the server before run one after the other, and the one that has
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
            responses = server.service.background.responses
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
            assert (third["status"], third["output"][0]["status"]) == ("cancelled", "incomplete")
            events = await events_after(server, ids[2])
            done = [event["item"] for event in events if event["type"].endswith("item.done")]
            assert done == third["output"]
            assert not server.engine.running
        assert not list((tmp_path / "b" / "responses").iterdir())

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
            server.service.responses._max_responses = 2
            ids = []
            for _ in range(4):
                ids.append(await begun(server, body_of("plain")))
                await ended(server, ids[-1])
            await server.service.background.save()
        with closing(Storage(tmp_path)) as storage:
            assert list(storage.background.responses) == ids[2:]

    asyncio.run(main())


def test_a_full_disk_is_told_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("setpoint.frontend.storage.background.RETRY_S", 0.01)

    async def main() -> None:
        async with server_on(tmp_path, engine_of("cut", step_s=0.002)) as server:
            body = body_of("cut", max_output_tokens=1000)
            own_id = await begun(server, body)
            response = server.service.background.responses[own_id]
            await until(lambda: response.num_written > 3)
            database = server.service.storage._documents._database
            (pages,) = database.execute("PRAGMA page_count").fetchone()
            database.execute(f"PRAGMA max_page_count = {pages}")
            (tmp_path / "responses").rename(tmp_path / "away")
            num_written = response.num_written
            await until(lambda: response.num_shown > num_written + 10)
            refused = await server.http.post(ROUTE, json=body | {"input": "x" * 3000})
            assert refused.status_code == 507
            assert "full" in refused.json()["message"]
            assert len(server.service.background.responses) == 1
            (tmp_path / "away").rename(tmp_path / "responses")
            database.execute("PRAGMA max_page_count = 100000")
            await until(lambda: response.num_written > num_written + 10)
            await copied(server, tmp_path, tmp_path.with_name("copy"))
        async with server_on(tmp_path.with_name("copy"), engine_of("cut")) as server:
            assert server.service.background.responses[own_id].num_shown > num_written
            text = (await ended(server, own_id))["output"][0]["content"][0]["text"]
            # The engine says the text again and again, with an end that is ignored between.
            assert text == ((TEXTS["cut"][0] + "\0") * 100)[:1000].replace("\0", "")

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert "cannot be stored (No such file or directory). The response continues" in caplog.text
    assert "Responses in the background cannot be stored at the moment" in caplog.text
    assert "Responses in the background are stored again." in caplog.text


def test_a_disk_that_stays_full_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with server_on(tmp_path, engine_of("cut", step_s=0.002)) as server:
            body = body_of("cut", max_output_tokens=1000)
            response = server.service.background.responses[await begun(server, body)]
            await until(lambda: response.num_written > 3)
            database = server.service.storage._documents._database
            (pages,) = database.execute("PRAGMA page_count").fetchone()
            database.execute(f"PRAGMA max_page_count = {pages}")
            for _ in range(3):
                refused = await server.http.post(ROUTE, json=body | {"input": "x" * 3000})
                assert refused.status_code == 507
                num_written = response.num_written  # its tokens still find room
                await until(lambda: response.num_written > num_written + 3)  # noqa: B023
            await ended(server, response.id)
            # It has ended by itself, which a cancellation does not change, and may say.
            cancelled = await server.http.post(f"{ROUTE}/{response.id}/cancel")
            assert (cancelled.status_code, response.is_saved) == (200, False)
            assert cancelled.json()["status"] == "incomplete"
            database.execute("PRAGMA max_page_count = 100000")

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    told = [each for each in caplog.messages if "Responses in the background" in each]
    assert len(told) == 1, told


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0" * 4096,
        lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        lambda data: b"\xff" * len(data),
        lambda data: b"",
    ],
)
def test_damaged_outputs_are_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[bytes], bytes]
) -> None:
    async def main() -> None:
        async with server_on(tmp_path / "a", engine_of("calls", step_s=0.005)) as server:
            own_id = await begun(server, body_of("calls"))
            response = server.service.background.responses[own_id]
            await until(lambda: response.num_shown > 30)
            await copied(server, tmp_path / "a", tmp_path / "b")
            await ended(server, own_id)
            expected = await events_after(server, own_id)
        damage(tmp_path / "b" / "responses" / own_id, change)
        async with server_on(tmp_path / "b", engine_of("calls")) as server:
            await ended(server, own_id)
            assert (await events_after(server, own_id))[:-1] == expected[:-1]

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert ("of the stored output of resp_" in caplog.text) == bool(change(b"0123"))


def test_a_file_that_cannot_be_read_ends_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with server_on(tmp_path / "a", engine_of("calls", step_s=0.005)) as server:
            own_id = await begun(server, body_of("calls"))
            response = server.service.background.responses[own_id]
            await until(lambda: response.num_shown > 30)
            await copied(server, tmp_path / "a", tmp_path / "b")
            await ended(server, own_id)
            expected = await events_after(server, own_id)
        responses = tmp_path / "b" / "responses"
        (responses / own_id).unlink()
        (responses / own_id).mkdir()
        (responses / "resp_of_nobody").mkdir()
        async with server_on(tmp_path / "b", engine_of("calls")) as server:
            await ended(server, own_id)
            assert (await events_after(server, own_id))[:-1] == expected[:-1]
        assert (responses / "resp_of_nobody").is_dir()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "cannot be read (Is a directory): it is computed again." in caplog.text
    assert "resp_of_nobody belongs to no response and stays: Is a directory." in caplog.text


def test_a_broken_database_ends_the_start_with_the_name_of_the_folder(tmp_path: Path) -> None:
    with closing(Storage(tmp_path)) as storage:
        storage._documents._database.executemany(
            "INSERT INTO documents VALUES ('response', ?, ?)",
            [(str(number), bytes(3000)) for number in range(20)],
        )
    path = tmp_path / "documents.sqlite3"
    content = path.read_bytes()
    path.write_bytes(content[:12288] + b"\xff" * (len(content) - 12288))
    with pytest.raises(ConfigError) as refusal:
        Storage(tmp_path)
    assert f"--file-storage-path {tmp_path} cannot be used: documents.sqlite3" in str(refusal.value)


def test_a_damaged_document_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with server_on(tmp_path, says("Hi", context_len=ROOM)) as server:
            own_id = await begun(server, body_of("plain"))
            await ended(server, own_id)
            await server.service.background.save()
            database = server.service.storage._documents._database
            database.execute("UPDATE documents SET content = '{' WHERE kind = 'response'")
        async with server_on(tmp_path, says("Hi", context_len=ROOM)) as server:
            assert (await server.http.get(f"{ROUTE}/{own_id}")).status_code == 404

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "The stored response resp_" in caplog.text


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
