"""A batch against the real service on a fake engine: every request answered exactly once, whatever
happens in between."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from setpoint.batch.entry import BatchError, Entry
from setpoint.batch.journal import Journal
from setpoint.batch.jsonl import JsonlSource
from setpoint.batch.output import AsTheyCome, InOrder
from setpoint.batch.progress import status
from setpoint.batch.run import BatchRun
from setpoint.batch.tally import Tally
from setpoint.core.errors import EngineDeadError
from setpoint.core.messages import Finish
from setpoint.core.model import Pooling
from setpoint.frontend import feed
from setpoint.testing.fake_engine import EMBEDDING_SIZE, FakeEngine

Serve = Callable[..., None]
DRAIN_S = 20.0


def line(number: int, **changes: Any) -> dict[str, Any]:
    body = {"prompt": f"p{number}", "max_tokens": 1 + number % 7}
    return {
        "custom_id": f"id-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": body,
    } | changes


def write(folder: Path, lines: list[Any]) -> Path:
    path = folder / "in.jsonl"
    path.write_text(
        "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines)
    )
    return folder / "out.jsonl"


class Batch:
    """One run of a batch over ``in.jsonl``, beside ``out``, on a server of the ``serve``
    fixture."""

    def __init__(self, server: Any, out: Path, *, keep_order: bool = False) -> None:
        self._out = out
        self._keep_order = keep_order
        self._service = server.service
        self.stop = asyncio.Event()
        self.num_read = 0
        self.run_: BatchRun | None = None
        self.tally: Tally | None = None

    async def run(self) -> Tally:
        with (
            closing(JsonlSource(self._out.with_name("in.jsonl"))) as source,
            Journal(self._out) as journal,
        ):
            survey = source.survey()
            self.tally = tally = Tally(survey.num_requests)
            done = journal.recover(survey, tally, in_order=self._keep_order)
            output = InOrder(journal, after=done.last) if self._keep_order else AsTheyCome(journal)
            self.run_ = BatchRun(self._service, journal, output, tally, digest=survey.digest)
            await self.run_.run(
                self._counted(source.entries(survey, done)), stop=self.stop, drain_s=DRAIN_S
            )
        return tally

    def _counted(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        for entry in entries:
            self.num_read += 1
            yield entry


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in out.read_bytes().splitlines()]


def ids(out: Path) -> list[str]:
    return [record["custom_id"] for record in records(out)]


def test_every_line_gets_one_record_in_openais_format(serve: Serve, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    out = write(
        tmp_path,
        [
            line(1),
            line(2, url="/v1/chat/completions", body=chat),
            "\n",
            "{nonsense}\n",
            line(3, url="/v1/nothing"),
            line(4, method="GET"),
            line(5, body={"prompt": "x" * 300}),
            line(6, body={"prompt": "x", "stream": True}),
            line(7, body={"prompt": "x", "suffix": "y"}),
            line(8, body={"prompt": ["a", "b"], "n": 2, "max_tokens": 2}),
            line(9, body={"prompt": 5}),
        ],
    )

    async def scenario(server: Any) -> None:
        tally = await Batch(server, out).run()
        assert (tally.num_requests, tally.num_done, tally.num_failed) == (10, 10, 7)
        assert (tally.prompt_tokens, tally.output_tokens) == (2 + 21 + 2, 2 + 3 + 8)
        assert {code: reason.count for code, reason in tally.reasons.items()} == {
            "not_json": 1,
            "unknown_url": 1,
            "bad_request": 1,
            "status_400": 4,
        }

    serve(scenario)
    by_line = {int(record["id"].rpartition("_")[2]): record for record in records(out)}
    assert sorted(by_line) == [1, 2, 4, 5, 6, 7, 8, 9, 10, 11]
    assert len({record["id"] for record in by_line.values()}) == 10
    for number in (1, 2, 10):
        record = by_line[number]
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert (record["error"], record["response"]["status_code"]) == (None, 200)
        assert record["response"]["request_id"] == record["response"]["body"]["id"] == record["id"]
    assert by_line[1]["custom_id"] == "id-1"
    assert by_line[1]["response"]["body"]["choices"][0]["text"] == "p1"
    assert by_line[2]["response"]["body"]["object"] == "chat.completion"
    assert len(by_line[10]["response"]["body"]["choices"]) == 4
    assert by_line[4]["custom_id"] is None
    assert by_line[4]["response"] is None
    assert (by_line[4]["error"]["code"], by_line[4]["error"]["line"]) == ("not_json", 4)
    assert re.fullmatch(
        r"url must be one of /v1/chat/completions, .*; got '/v1/nothing'\.",
        by_line[5]["error"]["message"],
    )
    assert "longer than the model's context length" in by_line[7]["error"]["message"]
    assert by_line[7]["response"]["status_code"] == 400
    assert by_line[7]["response"]["body"]["object"] == "error"
    assert "stream must not be true" in by_line[8]["error"]["message"]
    assert "suffix is not supported" in by_line[9]["error"]["message"]
    assert by_line[11]["response"]["body"]["type"] == "Bad Request"


def test_embeddings(serve: Serve, tmp_path: Path) -> None:
    out = write(tmp_path, [line(1, url="/v1/embeddings", body={"input": ["a", "bc"]}), line(2)])

    async def scenario(server: Any) -> None:
        tally = await Batch(server, out).run()
        assert (tally.num_failed, tally.prompt_tokens, tally.output_tokens) == (1, 3, 0)

    serve(scenario, pooling=Pooling("last", True, EMBEDDING_SIZE, None, "test"))
    by_id = {record["custom_id"]: record for record in records(out)}
    assert [one["index"] for one in by_id["id-1"]["response"]["body"]["data"]] == [0, 1]
    assert by_id["id-2"]["error"]["code"] == "status_400"


def test_a_refusal_of_the_engine_is_a_failure_of_its_request_alone(
    serve: Serve, tmp_path: Path
) -> None:
    out = write(tmp_path, [line(number) for number in range(5)])
    full = Finish("abort", message="No room.", status_code=503, err_type="SERVICE_UNAVAILABLE")
    engine = FakeEngine(refuse=lambda request: full if request.prompt()[1] == ord("3") else None)

    async def scenario(server: Any) -> None:
        tally = await Batch(server, out).run()
        assert (tally.num_done, tally.num_failed) == (5, 1)
        assert tally.reasons["status_503"].first.message == "No room."

    serve(scenario, engine)


def test_cut_anywhere_the_next_run_answers_the_rest_exactly_once(
    serve: Serve, tmp_path: Path
) -> None:
    """A power cut or SIGKILL leaves a beginning of the file: any beginning."""
    lines = [line(number) for number in range(12)]
    out = write(tmp_path, [*lines[:5], "bad\n", *lines[5:]])
    rng = random.Random(1)

    async def scenario(server: Any) -> None:
        await Batch(server, out).run()
        whole = out.read_bytes()
        for size in (0, len(whole), *(rng.randrange(len(whole)) for _ in range(20))):
            out.write_bytes(whole[:size])
            before = len(server.engine.submitted)
            tally = await Batch(server, out).run()
            assert sorted(record["id"] for record in records(out)) == sorted(
                json.loads(one)["id"] for one in whole.splitlines()
            )
            assert (tally.num_done, tally.num_failed) == (13, 1)
            assert len(server.engine.submitted) - before <= tally.num_now, (
                "what is answered is not asked again"
            )

    serve(scenario)


@pytest.mark.parametrize("keep_order", [False, True])
def test_cancelled_at_any_moment_it_goes_on(serve: Serve, tmp_path: Path, keep_order: bool) -> None:
    out = write(tmp_path, [line(number) for number in range(60)])
    rng = random.Random(2)

    async def scenario(server: Any) -> None:
        num_cancelled = 0
        while not out.exists() or len(records(out)) < 60:
            batch = asyncio.create_task(Batch(server, out, keep_order=keep_order).run())
            await asyncio.wait([batch], timeout=rng.uniform(0, 0.02))
            if not batch.done():
                num_cancelled += 1
                batch.cancel()
                await asyncio.wait([batch])
        assert num_cancelled
        assert sorted(ids(out)) == sorted(f"id-{number}" for number in range(60))
        if keep_order:
            assert ids(out) == [f"id-{number}" for number in range(60)]

    serve(scenario, FakeEngine(max_running=4, step_s=0.001))


def test_order_of_completion_or_of_the_input(serve: Serve, tmp_path: Path) -> None:
    lines = [
        line(number, body={"prompt": "x", "max_tokens": 50 if number == 0 else 1})
        for number in range(20)
    ]

    async def scenario(server: Any) -> None:
        out = write(tmp_path, lines)
        await Batch(server, out).run()
        assert ids(out)[-1] == "id-0"
        out.unlink()
        await Batch(server, out, keep_order=True).run()
        assert ids(out) == [f"id-{number}" for number in range(20)]

    serve(scenario)


def test_answers_behind_a_slow_one_stop_the_feeding(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_HELD_BYTES", 10_000)
    monkeypatch.setattr(feed, "QUEUE_TARGET", 5)
    monkeypatch.setattr(feed, "LOOK_S", 0.001)
    out = write(
        tmp_path,
        [
            line(number, body={"prompt": "x", "max_tokens": 240 if number == 0 else 1})
            for number in range(400)
        ],
    )

    async def scenario(server: Any) -> None:
        batch = Batch(server, out, keep_order=True)
        running = asyncio.create_task(batch.run())
        while not out.exists() or not out.stat().st_size:
            await asyncio.sleep(0)
            num_read = batch.num_read
        assert num_read < 100, "about 10,000 bytes of records of about 400 bytes, and the open ones"
        await running
        assert ids(out) == [f"id-{number}" for number in range(400)]

    serve(scenario, FakeEngine(max_running=3))


def test_the_queue_stays_in_the_healthy_range_and_the_file_on_disk(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "LOOK_S", 0.005)
    out = write(tmp_path, [line(number) for number in range(2000)])

    async def scenario(server: Any) -> None:
        batch = Batch(server, out)
        running = asyncio.create_task(batch.run())
        queued = []
        while not running.done():
            await asyncio.sleep(0.001)
            if 100 < batch.num_read < 2000:
                queued.append(len(server.engine.running) - 40)
                assert batch.num_read - len(records(out)) < 700
        steady = queued[len(queued) // 4 :]
        assert min(steady) >= 100
        assert max(queued) <= 2000
        assert batch.run_ is not None
        assert "0 failed" in status(await running, batch.run_.view)

    serve(scenario, FakeEngine(max_running=40))


def test_long_prompts_are_bounded_by_their_bytes(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_OPEN_BYTES", 1000)
    out = write(
        tmp_path,
        [line(number, body={"prompt": "x" * 200, "max_tokens": 2}) for number in range(30)],
    )
    most = 0

    async def scenario(server: Any) -> None:
        nonlocal most
        running = asyncio.create_task(Batch(server, out).run())
        while not running.done():
            most = max(most, len(server.engine.running))
            await asyncio.sleep(0)
        await running

    serve(scenario)
    assert most == 3
    assert len(set(ids(out))) == 30


def test_stopping_lets_open_requests_end_and_begins_none(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "QUEUE_TARGET", 10)
    out = write(tmp_path, [line(number) for number in range(500)])

    async def scenario(server: Any) -> None:
        batch = Batch(server, out)
        running = asyncio.create_task(batch.run())
        while not out.exists() or not out.stat().st_size:
            await asyncio.sleep(0)
        batch.stop.set()
        num_read = batch.num_read
        tally = await running
        assert num_read <= tally.num_done + 1 < 500
        assert batch.num_read <= num_read + 1
        await Batch(server, out).run()
        assert len(set(ids(out))) == len(ids(out)) == 500

    serve(scenario, FakeEngine(step_s=0.002))


def test_tokens_of_open_requests_count_at_once(serve: Serve, tmp_path: Path) -> None:
    body = {"prompt": "p", "max_tokens": 40, "n": 2}
    out = write(tmp_path, [line(number, body=body) for number in range(3)])

    async def scenario(server: Any) -> None:
        batch = Batch(server, out)
        running = asyncio.create_task(batch.run())
        seen = 0
        while not running.done():
            await asyncio.sleep(0.005)
            if batch.run_ is not None and batch.tally is not None and not batch.tally.num_done:
                batch.run_.look()
                seen = max(seen, batch.tally.open_output_tokens)
        tally = await running
        assert 2 <= seen <= 240
        batch.run_.look()
        assert (tally.open_output_tokens, tally.output_tokens) == (0, 240)

    serve(scenario, FakeEngine(step_s=0.005))


def test_a_drain_has_an_end(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "DRAIN_S", 0.05)
    out = write(tmp_path, [line(1)])

    async def scenario(server: Any) -> None:
        batch = Batch(server, out)
        batch.stop.set()
        assert (await batch.run()).num_done == 0
        batch = Batch(server, out)
        asyncio.get_running_loop().call_later(0.05, batch.stop.set)
        assert (await batch.run()).num_done == 0
        assert server.engine.stopped, "the open request was given back"

    serve(scenario, FakeEngine(silent=True))


def test_the_engines_death_ends_the_run_and_costs_no_answer(serve: Serve, tmp_path: Path) -> None:
    out = write(tmp_path, [line(number) for number in range(40)])

    async def dies(server: Any) -> None:
        running = asyncio.create_task(Batch(server, out).run())
        while not out.exists() or not out.stat().st_size:
            await asyncio.sleep(0)
        server.engine.running.clear()
        server.line.died("It ran out of luck.")
        with pytest.raises(EngineDeadError, match="out of luck"):
            await running
        assert 0 < len(records(out)) < 40

    async def goes_on(server: Any) -> None:
        await Batch(server, out).run()
        assert sorted(ids(out)) == sorted(f"id-{number}" for number in range(40))

    serve(dies, FakeEngine(step_s=0.005))
    serve(goes_on)


def test_a_full_disk_ends_the_run_with_one_message_and_whole_records(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = write(tmp_path, [line(number) for number in range(40)])
    real, room = os.write, 3000

    def full(fd: int, data: memoryview) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(fd, data[:room])
        room -= written
        return written

    async def scenario(server: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr("setpoint.batch.journal.os.write", full)
            with pytest.raises(BatchError, match="No space left on device"):
                await Batch(server, out).run()
        assert 0 < len(records(out)) < 40
        assert out.read_bytes().endswith(b"\n")
        await Batch(server, out).run()
        assert sorted(ids(out)) == sorted(f"id-{number}" for number in range(40))

    serve(scenario)


def test_a_bug_that_one_request_meets_is_its_failure(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from setpoint.frontend.apis.openai.completions import CompletionApi

    real = CompletionApi.open

    async def open_(self: CompletionApi, raw: dict[str, Any]) -> Any:
        if raw["prompt"] == "p1":
            raise ZeroDivisionError
        return await real(self, raw)

    monkeypatch.setattr(CompletionApi, "open", open_)
    out = write(tmp_path, [line(0), line(1), line(2)])

    async def scenario(server: Any) -> None:
        tally = await Batch(server, out).run()
        assert (tally.num_done, tally.num_failed) == (3, 1)
        assert tally.reasons["status_500"].first.line == 2

    serve(scenario)
