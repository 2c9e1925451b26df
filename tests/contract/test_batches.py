"""``/v1/batches`` on a fake engine: the official client's way through it, every end of a batch,
restarts in the middle, and interactive requests beside one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import batches
import openai
import pytest
from answers import HI
from batches import Clock
from test_embedding_routes import LAST

from setpoint.batch import worker
from setpoint.batch.entry import BatchError
from setpoint.batch.journal import Journal
from setpoint.core.messages import Finish
from setpoint.frontend import feed
from setpoint.frontend.storage.storage import Storage
from setpoint_testing.byte_tokenizer import EOS_ID
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
ENDS = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LOOK_S", 0.01)
    monkeypatch.setattr(feed, "LOOK_S", 0.01)


async def upload(server: Any, lines: list[Any]) -> str:
    content = "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines)
    file = await server.openai.files.create(file=("in.jsonl", content.encode()), purpose="batch")
    return str(file.id)


async def create(server: Any, file_id: str, **options: Any) -> Any:
    return await server.openai.batches.create(
        **{
            "input_file_id": file_id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            **options,
        }
    )


async def ended(server: Any, batch_id: str) -> Any:
    async with asyncio.timeout(20):
        while (batch := await server.openai.batches.retrieve(batch_id)).status not in ENDS:
            await asyncio.sleep(0.01)
    return batch


async def lines_of(server: Any, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = (await server.openai.files.content(file_id)).content
    return [json.loads(line) for line in content.splitlines()]


def test_a_batch_through_its_life(serve: Serve, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        good = [batches.line(number) for number in range(20)]
        bad = [batches.line(20, url="/v1/embeddings"), "nonsense\n", batches.line(21, body={})]
        file_id = await upload(server, [*good, *bad])
        batch = await create(
            server, file_id, metadata={"why": "test"}, output_expires_after=_for(7200)
        )
        assert (batch.status, batch.metadata) == ("validating", {"why": "test"})
        assert batch.expires_at == batch.created_at + 86400
        batch = await ended(server, batch.id)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (23, 20, 3)
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        answers = await lines_of(server, batch.output_file_id)
        assert sorted(answer["custom_id"] for answer in answers) == sorted(
            line["custom_id"] for line in good
        )
        assert all(
            answer["response"]["body"]["choices"][0]["text"] == "p7"[: 1 + 7 % 7]
            for answer in answers
            if answer["custom_id"] == "id-7"
        )
        errors = await lines_of(server, batch.error_file_id)
        assert {error["error"]["code"] for error in errors} == {
            "unknown_url",
            "not_json",
            "status_400",
        }
        output = await server.openai.files.retrieve(batch.output_file_id)
        assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
        assert output.expires_at == output.created_at + 7200
        async with asyncio.timeout(20):
            while list((tmp_path / "batches").glob("*.journal.jsonl")):
                await asyncio.sleep(0.01)
        assert [each.id for each in (await server.openai.batches.list()).data] == [batch.id]
        with pytest.raises(openai.BadRequestError, match="is completed; it cannot be cancelled"):
            await server.openai.batches.cancel(batch.id)

    serve(scenario, storage=Storage(tmp_path))


def _for(seconds: int) -> dict[str, Any]:
    return {"anchor": "created_at", "seconds": seconds}


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_every_endpoint_and_files_without_failures(
    serve: Serve, tmp_path: Path, endpoint: str
) -> None:
    async def scenario(server: Any) -> None:
        body = {
            "/v1/chat/completions": {"messages": HI, "max_tokens": 3},
            "/v1/completions": {"prompt": "hi", "max_tokens": 3},
            "/v1/responses": {"input": "hi", "max_output_tokens": 3},
        }[endpoint]
        file_id = await upload(server, [batches.line(1, url=endpoint, body=body)])
        batch = await ended(server, (await create(server, file_id, endpoint=endpoint)).id)
        assert batch.error_file_id is None
        (answer,) = await lines_of(server, batch.output_file_id)
        usage = answer["response"]["body"]["usage"]
        assert usage.get("completion_tokens") == 3 or usage["output_tokens"] == 3

    serve(scenario, storage=Storage(tmp_path))


def test_embeddings(serve: Serve, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        line = batches.line(1, url="/v1/embeddings", body={"input": ["a", "b"]})
        batch = await create(server, await upload(server, [line]), endpoint="/v1/embeddings")
        (answer,) = await lines_of(server, (await ended(server, batch.id)).output_file_id)
        assert len(answer["response"]["body"]["data"]) == 2

    serve(scenario, storage=Storage(tmp_path), pooling=LAST)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["\n"], "holds no requests"),
        ([batches.line(1), batches.line(1)], "'id-1' on lines 1 and 2"),
        (["\x1f\x8b"], "compressed with gzip"),
    ],
)
def test_an_input_that_is_no_batch_fails_as_a_whole(
    serve: Serve, tmp_path: Path, lines: list[Any], message: str
) -> None:
    async def scenario(server: Any) -> None:
        content = "".join(
            one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines
        ).encode("latin-1")
        file = await server.openai.files.create(file=("in", content), purpose="batch")
        batch = await ended(server, (await create(server, file.id)).id)
        assert batch.status == "failed"
        (fault,) = batch.errors.data
        assert message in fault.message
        assert str(tmp_path) not in fault.message
        await server.openai.files.delete(file.id)

    serve(scenario, storage=Storage(tmp_path))


def test_cancelling_ends_soon_and_keeps_what_is_done(serve: Serve, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        lines = [
            batches.line(number, body={"prompt": "x", "max_tokens": 1 if number < 5 else 200})
            for number in range(400)
        ]
        file_id = await upload(server, lines)
        batch = await create(server, file_id)
        while (await server.openai.batches.retrieve(batch.id)).request_counts.completed < 5:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.BadRequestError, match=f"is the input of {batch.id}"):
            await server.openai.files.delete(file_id)
        assert (await server.openai.batches.cancel(batch.id)).status == "cancelling"
        assert (await server.openai.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
        batch = await ended(server, batch.id)
        assert batch.status == "cancelled"
        assert batch.cancelling_at <= batch.cancelled_at
        assert batch.error_file_id is None
        answers = await lines_of(server, batch.output_file_id)
        assert 5 <= len(answers) == batch.request_counts.completed < 400
        assert not server.engine.running
        await server.openai.files.delete(file_id)

    serve(scenario, FakeEngine(step_s=0.002, max_running=8), storage=Storage(tmp_path))


def test_what_the_window_leaves_out_is_named(serve: Serve, tmp_path: Path) -> None:
    clock = Clock()

    async def scenario(server: Any) -> None:
        lines = [batches.line(n, body={"prompt": "x", "max_tokens": 200}) for n in range(50)]
        batch = await create(server, await upload(server, lines), completion_window="2h")
        while (await server.openai.batches.retrieve(batch.id)).request_counts.completed < 3:
            await asyncio.sleep(0.01)
        clock.at += 7201
        batch = await ended(server, batch.id)
        assert batch.status == "expired"
        answers = await lines_of(server, batch.output_file_id)
        errors = await lines_of(server, batch.error_file_id)
        assert len(answers) + len(errors) == 50
        assert {error["error"]["code"] for error in errors} == {"batch_expired"}
        assert batch.request_counts.failed == len(errors)

    engine = FakeEngine(step_s=0.0005, max_running=4)
    serve(scenario, engine, storage=Storage(tmp_path, now=clock))


def test_a_restart_goes_on_where_the_server_stopped(serve: Serve, tmp_path: Path) -> None:
    """Three servers one after the other; the second ends while the files are being made."""
    ids: list[str] = []

    async def begin(server: Any) -> None:
        lines = [batches.line(n, body={"prompt": f"p{n}", "max_tokens": 40}) for n in range(60)]
        ids.append((await create(server, await upload(server, lines))).id)
        while (await server.openai.batches.retrieve(ids[0])).request_counts.completed < 10:
            await asyncio.sleep(0.01)

    async def interrupt(server: Any) -> None:
        while (await server.openai.batches.retrieve(ids[0])).status != "finalizing":
            await asyncio.sleep(0)

    async def finish(server: Any) -> None:
        batch = await ended(server, ids[0])
        answers = await lines_of(server, batch.output_file_id)
        assert sorted(answer["custom_id"] for answer in answers) == sorted(
            f"id-{n}" for n in range(60)
        )
        assert (batch.status, batch.request_counts.completed) == ("completed", 60)
        assert len((await server.openai.files.list()).data) == 2

    for scenario in (begin, interrupt, finish):
        storage = Storage(tmp_path)
        serve(scenario, FakeEngine(step_s=0.001, max_running=8), storage=storage)
        storage.close()


def test_a_batch_goes_on_when_the_disk_has_room_again(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RETRY_S", 0.01)
    append, appended = Journal.append, []

    def full_at_times(self: Journal, data: bytes) -> None:
        appended.append(data)
        if len(appended) % 7 == 0:
            raise BatchError("The disk is full.")
        append(self, data)

    monkeypatch.setattr(Journal, "append", full_at_times)

    async def scenario(server: Any) -> None:
        file_id = await upload(server, [batches.line(n) for n in range(30)])
        batch = await ended(server, (await create(server, file_id)).id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 30)
        answers = await lines_of(server, batch.output_file_id)
        assert len({answer["custom_id"] for answer in answers}) == len(answers) == 30
        assert len(appended) > 30, "some were refused"

    serve(scenario, storage=Storage(tmp_path))


def test_a_damaged_journal_ends_its_batch_alone(serve: Serve, tmp_path: Path) -> None:
    ids: list[str] = []

    async def begin(server: Any) -> None:
        for number in range(2):
            file_id = await upload(server, [batches.line(number)])
            ids.append((await create(server, file_id)).id)

    async def go_on(server: Any) -> None:
        (fault,) = (await ended(server, ids[0])).errors.data
        assert fault.code == "internal_error"
        assert str(tmp_path) not in fault.message
        assert (await ended(server, ids[1])).status == "completed"

    storage = Storage(tmp_path)
    serve(begin, FakeEngine(silent=True), storage=storage)
    storage.close()
    (tmp_path / "batches" / f"{ids[0]}.journal.jsonl").write_text("not a record\n")
    serve(go_on, storage=Storage(tmp_path))


def test_batches_wait_for_each_other(serve: Serve, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        file_id = await upload(server, [batches.line(n) for n in range(30)])
        created = [(await create(server, file_id)).id for _ in range(3)]
        done = [await ended(server, one) for one in created]
        assert [each.status for each in done] == ["completed"] * 3
        assert [each.id for each in (await server.openai.batches.list()).data] == created[::-1]
        times = [each.completed_at for each in done]
        assert times == sorted(times)

    serve(scenario, storage=Storage(tmp_path))


def test_interactive_requests_find_a_slot(serve: Serve, tmp_path: Path) -> None:
    """A batch never has all slots, and takes none that clients want."""

    async def scenario(server: Any) -> None:
        lines = [batches.line(n, body={"prompt": "x", "max_tokens": 100}) for n in range(200)]
        batch = await create(server, await upload(server, lines))
        while len(server.engine.running) < 14:
            await asyncio.sleep(0.001)
        most = 0
        for _ in range(20):
            await server.generate(text="interactive", sampling_params={"max_new_tokens": 2})
            most = max(most, len(server.engine.running))
        assert most <= 16
        many = [
            asyncio.create_task(server.generate(text="y", sampling_params={"max_new_tokens": 60}))
            for _ in range(64)
        ]
        await asyncio.gather(*many)
        before = len([r for r in server.engine.submitted if r.prompt().tolist() == [ord("x")]])
        assert before < 100, "the batch kept out of the way of 64 clients"
        await server.openai.batches.cancel(batch.id)
        await ended(server, batch.id)

    serve(scenario, FakeEngine(step_s=0.001, max_running=16), storage=Storage(tmp_path))


def test_what_a_busy_engine_refuses_is_tried_again(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PATIENCE_S", (0.01, 0.01))
    tries: dict[str, int] = {}

    def refuse(request: Any) -> Finish | None:
        tries[request.rid] = tries.get(request.rid, 0) + 1
        if request.prompt()[-1] % 2 and tries[request.rid] < 3:
            return Finish("abort", message="Full.", status_code=503)
        return (
            Finish("abort", message="Never.", status_code=503) if tries[request.rid] > 5 else None
        )

    async def scenario(server: Any) -> None:
        lines = [batches.line(n, body={"prompt": f"p{n}", "max_tokens": 1}) for n in range(9)]
        never = batches.line(9, body={"prompt": "p9", "max_tokens": 100})
        batch = await create(server, await upload(server, [*lines, never]))
        batch = await ended(server, batch.id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (9, 1)
        (error,) = await lines_of(server, batch.error_file_id)
        assert (error["custom_id"], error["error"]["code"]) == ("id-9", "status_503")

    engine = FakeEngine(eos_ids=frozenset({EOS_ID}), refuse=refuse)
    serve(scenario, engine, storage=Storage(tmp_path))
