"""A batch against the real service on a fake engine: every request answered exactly once, whatever
happens in between."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batches import Batch, ids, line, records, write

from setpoint.batch.entry import BatchError
from setpoint.core.errors import EngineDeadError
from setpoint.core.messages import Finish
from setpoint.core.model import Pooling
from setpoint_testing.fake_engine import EMBEDDING_SIZE, FakeEngine

Serve = Callable[..., None]


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
    assert by_line[11]["response"]["body"]["type"] == "invalid_request_error"


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
            # The time grows, so that a slow machine reaches the end too.
            await asyncio.wait([batch], timeout=rng.uniform(0, 0.002 * (1 + num_cancelled)))
            if batch.done():
                batch.result()
            else:
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
