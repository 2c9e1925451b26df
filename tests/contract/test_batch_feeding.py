"""How a batch feeds the engine: the queue stays in the healthy range, long prompts and slow answers
hold it back, a stop begins none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import batches
import pytest
from batches import Batch, ids, line, records, write

from setpoint.batch.batch_progress import status
from setpoint.frontend import feed
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]


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

    serve(scenario, FakeEngine(max_running=40, step_s=0.002))


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
    monkeypatch.setattr(batches, "DRAIN_S", 0.05)
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
