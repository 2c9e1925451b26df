"""``GET /doctor``, the log line and the metric, on a fake engine that tells moments from a script."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from setpoint.core.moments import Moment
from setpoint.frontend.telemetry import limit_news, watching
from setpoint.frontend.telemetry.metrics.metering import MetricsConfig
from setpoint.ipc.line import EngineLine
from setpoint.launch.parent.doctor import ServerDoctor
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
INFO = {
    "version": "1.2.3",
    "device": "cpu",
    "max_running_requests": 2,
    "max_total_num_tokens": 10_000,
    "schedule_conservativeness": 1.0,
}


def capped(count: int, *, at: float = 1000.0) -> list[Moment]:
    """Two run, and fourteen wait for their slots."""
    return [
        Moment(
            at=at + second,
            seconds=1.0,
            num_decode=50,
            running=2.0,
            running_max=2.0,
            queue=14.0,
            queue_min=14.0,
            queue_max=14.0,
            usage=0.05,
            usage_max=0.05,
            tokens=500.0,
            gen_throughput=100.0,
            output_tokens=100,
            refusals={"no_slot": 50, "blocked": 650},
            new_token_ratio=0.5,
            busy_s=0.99,
            model_s=0.9,
        )
        for second in range(count)
    ]


async def busy(server: Any) -> asyncio.Task[Any]:
    """A request that is open until its task is cancelled or the engine dies."""
    server.engine.silent = True
    task = asyncio.create_task(server.http.post("/generate", json={"text": "a"}))
    while not server.engine.running:
        await asyncio.sleep(0)
    return task


async def doctor(server: Any, query: str = "") -> Any:
    response = await server.http.get(f"/doctor{query}")
    assert response.status_code == 200, response.text
    return response.json()


def test_the_report_names_the_cap(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        server.engine.moments = capped(60)
        found = await doctor(server)
        assert found["verdict"] == "seq-cap"
        (first, *_) = found["findings"]
        assert first["action"]["flag"] == "--max-running-requests"
        assert first["action"]["direction"] == "increase"
        assert first["action"]["value"] > 2
        assert any("14.0 wait" in each["text"] for each in first["evidence"])
        assert found["sources"][0]["kind"] == "live"
        assert "moments" not in found

    serve(scenario, FakeEngine(max_running=2), server_info=INFO, make_doctor=ServerDoctor)


def test_the_window_is_as_long_as_was_asked_for(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        server.engine.moments = capped(60)
        found = await doctor(server, "?seconds=30&moments=true")
        assert len(found["moments"]) == 30
        assert found["moments"][-1]["refusals"] == {"no_slot": 50, "blocked": 650}
        assert found["server_info"]["max_total_num_tokens"] == 1000  # the engine's word
        assert found["ended"] == ""
        for wrong in ("0", "-1", "nan", "inf", "x"):
            response = await server.http.get(f"/doctor?seconds={wrong}")
            assert response.status_code == 400, wrong
            assert "seconds" in response.json()["message"]

    serve(scenario, FakeEngine(max_running=2), server_info=INFO, make_doctor=ServerDoctor)


def test_a_server_without_work_says_what_it_misses(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        found = await doctor(server)
        assert found["verdict"] == "not-enough-evidence"
        assert found["missing"]

    serve(scenario, server_info=INFO, make_doctor=ServerDoctor)


def test_a_server_without_a_doctor_says_so(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.http.get("/doctor")).status_code == 404

    serve(scenario)


def test_it_needs_the_key(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.http.get("/doctor")).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await server.http.get("/doctor", headers=headers)).status_code == 200

    serve(scenario, api_key="secret", server_info=INFO, make_doctor=ServerDoctor)


def test_a_dead_engine_leaves_a_report_and_the_next_one_begins_anew(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        server.engine.moments = capped(60)
        await doctor(server)
        server.line.died("The process was ended by SIGKILL.")
        found = await doctor(server)
        assert found["verdict"] == "server-dead"
        assert "was ended by SIGKILL" in found["sources"][0]["notes"][0]
        second = FakeEngine(max_running=2, moments=capped(3, at=1200.0), loads=True)
        server.service.engine.attach(EngineLine(second))
        # Red before: the next engine was judged before it was ready, and the watch failed.
        assert (await doctor(server))["verdict"] == "server-dead"
        second.loaded()
        found = await doctor(server, "?moments=true")
        assert found["verdict"] != "server-dead"
        assert [each["at"] for each in found["moments"]] == [1200.0, 1201.0, 1202.0]
        # Those who watch see both lives, and the gap between.
        assert [each.at for each in server.service.watch.lanes[None].moments][58:] == [
            *(1058.0, 1059.0),
            *(1200.0, 1201.0, 1202.0),
        ]

    serve(scenario, FakeEngine(max_running=2), server_info=INFO, make_doctor=ServerDoctor)


def test_engines_are_judged_together_and_each_by_itself(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        began = float(int(time.time()) - 60)
        server.engine.moments = capped(60, at=began)
        idle = [
            msgspec.structs.replace(
                moment,
                running=1.0,
                running_max=1.0,
                queue=0.0,
                queue_min=0.0,
                queue_max=0.0,
                refusals={},
            )
            for moment in capped(60, at=began - 0.5)
        ]
        second = EngineLine(FakeEngine(max_running=2, moments=idle), rank=1)
        server.service.engine.attach(second)
        found = await doctor(server, "?moments=true")
        assert found["verdict"] == "rank-imbalance"
        (middle,) = (each for each in found["moments"] if each["at"] == began + 30)
        assert middle["running"] == 3.0
        assert (await doctor(server, "?dp_rank=0"))["verdict"] == "seq-cap"
        assert (await doctor(server, "?dp_rank=1"))["verdict"] not in ("seq-cap", "rank-imbalance")
        for wrong in ("2", "-1", "x"):
            response = await server.http.get(f"/doctor?dp_rank={wrong}")
            assert response.status_code == 400
            assert "dp_rank" in response.json()["message"]
        second.died("The process was ended by SIGKILL.")
        found = await doctor(server)
        assert found["verdict"] != "server-dead", "the other one serves"
        assert any("DP1: The engine has ended" in note for note in found["sources"][0]["notes"])
        server.line.died("The process was ended by SIGSEGV.")
        assert (await doctor(server))["verdict"] == "server-dead"

    serve(scenario, FakeEngine(max_running=2), server_info=INFO, make_doctor=ServerDoctor)


def test_many_questions_at_once_ask_the_engine_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, 200 would wait 200 times as long as one: for an engine that hangs, 200
    times two seconds."""
    monkeypatch.setattr(watching, "ANSWER_S", 3.0)

    async def scenario(server: Any) -> None:
        server.engine.moments = capped(60)
        found = await asyncio.gather(*(doctor(server) for _ in range(50)))
        assert {each["verdict"] for each in found} == {"seq-cap"}
        assert server.engine.num_asked < 10
        server.engine.mute = True
        async with asyncio.timeout(90):  # 150 s, if each waited for its own answer
            found = await asyncio.gather(*(doctor(server) for _ in range(50)))
        assert "did not answer" in found[-1]["sources"][0]["notes"][0]
        server.engine.mute = False
        assert not (await doctor(server))["sources"][0]["notes"]

    serve(scenario, FakeEngine(max_running=2), server_info=INFO, make_doctor=ServerDoctor)


def test_an_engine_that_does_not_answer_leaves_the_moments_of_before(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "ANSWER_S", 0.05)

    async def scenario(server: Any) -> None:
        server.engine.moments = capped(60)
        await doctor(server)
        server.engine.mute = True
        found = await doctor(server)
        assert found["verdict"] == "seq-cap"
        (note,) = found["sources"][0]["notes"]
        assert "did not answer" in note
        server.engine.mute = False
        assert (await doctor(server))["sources"][0]["notes"] == []

    serve(scenario, FakeEngine(max_running=2), server_info=INFO, make_doctor=ServerDoctor)


def limits(page: str) -> dict[str, float]:
    return {
        sample.labels["limit"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "setpoint:binding_limit"
    }


def test_the_log_and_the_metric_tell_of_a_limit_and_of_its_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("LOOK_S", "EXAMINE_S"):
        monkeypatch.setattr(watching, name, 0.01)
    monkeypatch.setattr(limit_news, "LOG_EVERY_S", 0.0)
    monkeypatch.setattr(watching, "REST_S", 0.05)

    def news() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name == limit_news.__name__]

    async def page(server: Any, wanted: dict[str, float]) -> None:
        async with asyncio.timeout(600):
            while limits((await server.http.get("/metrics")).text) != wanted:
                await asyncio.sleep(0.01)

    async def scenario(server: Any) -> None:
        server.engine.moments = capped(60)
        watching_task = asyncio.create_task(server.service.watch.run())
        await asyncio.sleep(0.05)
        assert server.engine.num_asked == 0, "nobody asks an idle engine"
        request = await busy(server)
        await page(server, {"seq-cap": 1.0})
        async with asyncio.timeout(600):
            while not (lines := news()):
                await asyncio.sleep(0.01)
        assert lines[0].startswith("Doctor: seq-cap limits the server. ")
        assert "--max-running-requests" in lines[0]
        num_asked = server.engine.num_asked
        async with asyncio.timeout(600):
            while server.engine.num_asked < num_asked + 3:
                await asyncio.sleep(0.01)
        assert len(news()) == 1, "once for a change"
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await page(server, {"seq-cap": 0.0})
        watching_task.cancel()

    with caplog.at_level(logging.INFO, "setpoint.frontend.telemetry.limit_news"):
        serve(
            scenario,
            FakeEngine(max_running=2),
            server_info=INFO,
            make_doctor=ServerDoctor,
            metrics=MetricsConfig(),
        )


def test_followers_have_the_engine_asked_and_see_what_clients_saw(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "FOLLOWED_S", 0.01)

    async def scenario(server: Any) -> None:
        watch = server.service.watch
        task = asyncio.create_task(watch.run())
        await server.generate(text="abcd", sampling_params={"max_new_tokens": 8})
        began = watch._latencies._present()[0]
        server.engine.moments = capped(2, at=began - 0.25)
        with watch.followed(), watch.followed():
            async with asyncio.timeout(600):
                while len(watch.lanes[None].moments) < 2:
                    await asyncio.sleep(0.01)
        assert {"ttft_p50", "ttft_p95", "itl_p50", "itl_p99"} <= watch.lanes[None].moments[
            0
        ].quantiles.keys()
        assert watch.lanes[None].limits[began - 0.25] == "seq-cap"
        await asyncio.sleep(0.05)
        num_asked = server.engine.num_asked
        await asyncio.sleep(0.1)
        assert server.engine.num_asked <= num_asked + 1
        task.cancel()

    serve(scenario, FakeEngine(max_running=2), server_info=INFO, make_doctor=ServerDoctor)


def test_a_doctor_that_fails_does_not_end_the_watch(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("LOOK_S", "EXAMINE_S"):
        monkeypatch.setattr(watching, name, 0.01)

    async def scenario(server: Any) -> None:
        def fail(seen: Any) -> Any:
            raise ZeroDivisionError

        server.service.watch.doctor.examine = fail
        server.engine.moments = capped(60)
        task = asyncio.create_task(server.service.watch.run())
        request = await busy(server)
        async with asyncio.timeout(600):
            while len(caplog.records) < 2:
                await asyncio.sleep(0.01)
        assert not task.done()
        assert "goes on without its doctor" in caplog.text
        task.cancel()
        request.cancel()
        await asyncio.gather(request, task, return_exceptions=True)

    serve(scenario, FakeEngine(max_running=2), server_info=INFO, make_doctor=ServerDoctor)
