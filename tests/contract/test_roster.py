"""The table of requests: what people who watch see of each, and what they never see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from conftest import Server
from setpoint.frontend.telemetry.roster import MAX_ENDED, MAX_OPEN, Table
from setpoint.ipc.line import EngineLine
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]


async def table(server: Server) -> Table:
    return server.service.events.roster.table([(0, await server.line.list_requests())])


def generating(server: Server, text: str, rid: str, tokens: int) -> asyncio.Task[object]:
    body = {"text": text, "rid": rid, "sampling_params": {"max_new_tokens": tokens}}
    return asyncio.create_task(server.http.post("/generate", json=body))


def test_open_and_ended_requests_have_a_row(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        tasks = [generating(server, "secret", f"r{number}", 20) for number in range(3)]
        while server.service.engine.num_open < 3 or not server.engine.running[0].num_sent > 3:
            await asyncio.sleep(0.005)
        found = await table(server)
        assert (found.num_running, found.num_queued) == (1, 2)
        first, second, third = found.rows
        assert (first.rid, first.state, first.route, first.limit) == (
            "r0",
            "running",
            "/generate",
            20,
        )
        assert first.output >= 3
        assert first.ttft_s is not None
        assert first.waited_s == 0.25
        assert (second.state, second.why, second.place) == ("waiting", "no_slot", 1)
        assert second.waited_s is not None
        assert second.ttft_s is None
        assert (third.why, third.place) == ("blocked", 2)
        await asyncio.gather(*tasks)
        found = await table(server)
        assert [row.rid for row in found.rows] == ["r2", "r1", "r0"]
        assert {row.state for row in found.rows} == {"ended"}
        assert {row.end for row in found.rows} == {"length"}
        assert found.rows[0].output == 20
        assert found.rows[0].ended_at is not None
        assert b"secret" not in msgspec.json.encode(found)

    serve(scenario, FakeEngine(max_running=1, step_s=0.005))


def test_tokens_count_when_they_are_made_not_when_they_are_sent(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        task = generating(server, "text", "r0", 60)
        while not server.engine.running or server.engine.running[0].num_sent < 1:
            await asyncio.sleep(0.001)
        server.engine.silent = True  # it makes tokens, and sends none
        for made in (20, 40):
            server.engine.running[0].num_sent = made
            (row,) = (await table(server)).rows
            assert row.output == made
            assert row.tps is not None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    serve(scenario, FakeEngine(step_s=0.05))


def test_a_client_that_leaves_is_told_apart(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        server.engine.silent = True
        task = generating(server, "text", "gone", 5)
        while not server.service.engine.num_open:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (row,) = (await table(server)).rows
        assert (row.rid, row.end, row.output) == ("gone", "left", 0)

    serve(scenario, FakeEngine())


def test_the_requests_of_every_engine_are_listed_also_those_that_have_moved(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        client = server.service.engine
        client.lives.recovers = True
        second = FakeEngine(step_s=0.05)
        line = EngineLine(second, rank=1)
        client.attach(line)
        server.engine.silent = second.silent = True
        tasks = [generating(server, "text", f"r{number}", 60) for number in range(4)]

        async def rows() -> dict[str, tuple[int | None, str, str | None]]:
            listed = await client.list_requests(timeout_s=60) if client.is_ready else []
            found = server.service.events.roster.table(listed, client.waiting_numbers)
            return {row.rid: (row.dp_rank, row.state, row.why) for row in found.rows}

        while len(server.engine.running) + len(second.running) < 4:
            await asyncio.sleep(0.001)
        found = await rows()
        assert sorted(rank for rank, state, _ in found.values()) == [0, 0, 1, 1]
        assert {state for _, state, _ in found.values()} == {"running"}
        line.died("It was ended by SIGKILL.")
        while len(server.engine.running) < 4:
            await asyncio.sleep(0.001)
        assert set((await rows()).values()) == {(None, "running", None)}, "one engine is left"
        server.line.died("It was ended by SIGKILL.")
        assert set((await rows()).values()) == {(None, "waiting", "engine")}
        assert sorted(await rows()) == ["r0", "r1", "r2", "r3"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    serve(scenario, FakeEngine(step_s=0.05))


def test_the_table_has_a_bounded_number_of_rows(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        for wave in range(2):
            tasks = [
                generating(server, "text", f"w{wave}r{number}", 6) for number in range(2 * MAX_OPEN)
            ]
            while server.service.engine.num_open < 2 * MAX_OPEN:
                await asyncio.sleep(0.001)
            found = await table(server)
            assert sum(row.state != "ended" for row in found.rows) == MAX_OPEN
            assert sum(row.state == "running" for row in found.rows) == MAX_OPEN // 2
            await asyncio.gather(*tasks)
        assert len((await table(server)).rows) == MAX_ENDED

    serve(scenario, FakeEngine(max_running=MAX_OPEN, step_s=0.05))


def test_refused_requests_and_probes_leave_no_row(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        refused = await server.http.post("/generate", json={"text": ""})
        assert refused.status_code == 400
        assert (await server.http.get("/health")).status_code == 200
        assert (await table(server)).rows == []

    serve(scenario)
