"""One notion of a window: the same run of the real scheduler, seen through its log, its recording,
its ``/metrics`` and its own moments, gives observations that agree, and the same verdict."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from setpoint.advisor.doctor.diagnose import diagnose
from setpoint.advisor.doctor.observations import Observations
from setpoint.advisor.doctor.readers.kept import live_observations
from setpoint.advisor.doctor.readers.log.reader import read_chunks
from setpoint.advisor.doctor.readers.metrics import of_scrapes
from setpoint.advisor.doctor.readers.scrape import read_scrape
from setpoint.advisor.doctor.readers.sources import observe_sources
from setpoint.config.commands import ReplayOptions
from setpoint.core.messages import Call
from setpoint.core.records import Record
from setpoint.core.settings import Settings
from setpoint.frontend.ipc.client import EngineClient
from setpoint.frontend.metrics.engines import EngineFigures
from setpoint.frontend.metrics.exposition import Metrics
from setpoint.frontend.metrics.http import HttpMetrics
from setpoint.frontend.metrics.requests import RequestMetrics
from setpoint.observe.logline import ready_line
from setpoint.observe.moments import Moment, merged
from setpoint.observe.readers import EngineReaders
from setpoint.observe.tee import Tee
from setpoint.recording.command import replay
from setpoint.recording.writer import RecordingConfig, start_recording
from setpoint.scheduler.cache.manager import CacheConfig
from setpoint.testing.simulated import CostModel, Engine, Simulation
from setpoint.testing.traffic import Arrivals, Load, Traffic, uniform

POOL = 20_000
CONTEXT = 4096
BEGAN_AT = 1_760_000_000.0


@dataclass
class Run:
    """One run, as each of its readers saw it."""

    log: str
    recording: Path
    pages: list[tuple[float, str]]
    """When each was scraped, and what it was."""
    moments: list[Moment]
    settings: Settings


class Keeping:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def on(self, record: Record) -> None:
        self.records.append(record)


def run_for(seconds: float, folder: Path, *, load: Load, users: int, **settings: Any) -> Run:
    used = Settings(
        **{
            "max_running_requests": 64,
            "chunked_prefill_size": 2048,
            "max_prefill_tokens": 16384,
            "decode_log_interval": 4,
            **settings,
        }
    )
    engine = Engine(CostModel(0.06, 0.0001, 1e-8), POOL, CONTEXT, used)
    kept = Keeping()
    readers = EngineReaders(
        device="cpu", decode_log_interval=4, request_times=False, metrics=True, epoch=BEGAN_AT
    )
    traffic = Traffic(load, Arrivals(users=users), seed=1)
    simulation = Simulation(engine, traffic, traffic.num_outputs, Tee(readers, kept))
    metrics = _metrics()
    pages: list[tuple[float, str]] = []
    while (now := simulation.clock.now()) < seconds:
        if now >= 2 * len(pages):
            pages.append((BEGAN_AT + now, _page(metrics, simulation, readers, used)))
        simulation.turn()
    readers.moments.finish()
    recording = _record(kept.records, folder / "run.rec", simulation, used)
    return Run(_log_of(recording, used), recording, pages, readers.moments.since(0)[1], used)


def _metrics() -> Metrics:
    return Metrics(
        model_name="m",
        extra_labels={},
        client=EngineClient(),
        engines=EngineFigures(context_len=CONTEXT, page_size=1),
        requests=RequestMetrics(),
        http=HttpMetrics(),
        server=dict,
    )


def _page(
    metrics: Metrics, simulation: Simulation, readers: EngineReaders, settings: Settings
) -> str:
    reply = simulation._loop._answer(Call(1, "state"))
    memory = {"memory_usage": {"weight": 0.25, "kvcache": 0.5, "graph": 0.0}}
    state = msgspec.to_builtins(reply.value | readers.info() | memory)
    ready = {
        "max_total_num_tokens": POOL,
        "max_running_requests": settings.max_running_requests,
    }
    metrics._engines.take("the engine", ready, state)
    page, _ = metrics._written("")
    return page.decode()


def _record(records: list[Record], path: Path, simulation: Simulation, settings: Settings) -> Path:
    class Began:
        def now(self) -> float:
            return 0.0

    writer = start_recording(
        RecordingConfig(path=path, content="off", max_bytes=1 << 30),
        scheduler=simulation.scheduler.state.config,
        settings=settings,
        cache=CacheConfig(num_pages=POOL, page_size=1),
        clock=Began(),
        device="cpu",
    )
    for record in records:
        writer.on(record)
    writer.close()
    return path


def _log_of(recording: Path, settings: Settings) -> str:
    line = ready_line(
        max_total_num_tokens=POOL,
        chunked_prefill_size=settings.chunked_prefill_size or -1,
        max_prefill_tokens=settings.max_prefill_tokens,
        max_running_requests=settings.max_running_requests,
        context_len=CONTEXT,
        device="cpu",
        available_bytes=1 << 30,
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        replay(ReplayOptions(file=str(recording), print=True))
    text = printed.getvalue()
    return f"{text.partition(']')[0]}] {line}\n{text}"


def info_of(run: Run) -> dict[str, Any]:
    return {
        "device": "cpu",
        "version": "1",
        "max_total_num_tokens": POOL,
        "max_running_requests": run.settings.max_running_requests,
        "chunked_prefill_size": run.settings.chunked_prefill_size,
        "max_prefill_tokens": run.settings.max_prefill_tokens,
        "schedule_conservativeness": run.settings.conservativeness,
    }


def seen_by_all(run: Run) -> dict[str, Observations]:
    live = live_observations(info_of(run), run.moments, name="live")
    scrapes = [read_scrape(page, at=at, name="page") for at, page in run.pages]
    (log,) = read_chunks("log", [run.log.encode()])
    (recording,) = observe_sources([str(run.recording)], seconds=1)
    return {
        "live": live,
        "log": log,
        "recording": recording,
        "metrics": of_scrapes(scrapes, name="page", facts=live.facts),
    }


def whole(seen: Observations) -> Moment:
    (rank,) = seen.ranks
    return merged(rank.moments)


SHORT = Load(uniform(100, 400), uniform(20, 60), 256)
LONG = Load(uniform(1500, 2000), uniform(10, 20), 1500)


@pytest.mark.parametrize(
    ("verdict", "load", "users", "settings"),
    [
        ("seq-cap", SHORT, 24, {"max_running_requests": 8}),
        ("client-bound", SHORT, 4, {}),
        ("kv-conservative", LONG, 30, {"conservativeness": 1.5}),
    ],
)
def test_all_readers_see_the_same_run(
    tmp_path: Path, verdict: str, load: Load, users: int, settings: dict[str, Any]
) -> None:
    run = run_for(60.0, tmp_path, load=load, users=users, **settings)
    seen = seen_by_all(run)
    live = whole(seen["live"])
    exact = whole(seen["recording"])
    for name in ("new_tokens", "cached_tokens", "output_tokens", "refusals", "ended", "num_decode"):
        assert getattr(exact, name) == getattr(live, name), name
    assert exact.running == pytest.approx(live.running)
    assert exact.quantiles.keys() >= {"ttft_p95", "itl_p50", "wait_p50"}
    scraped = whole(seen["metrics"])
    # The first second and the last are not between two scrapes.
    assert scraped.new_tokens == pytest.approx(live.new_tokens, rel=0.1)
    assert scraped.output_tokens == pytest.approx(live.output_tokens, rel=0.1)
    assert sum(scraped.refusals.values()) == pytest.approx(sum(live.refusals.values()), rel=0.1)
    logged = whole(seen["log"])
    assert logged.new_tokens == live.new_tokens
    for name, each in (("log", logged), ("metrics", scraped)):
        assert each.running == pytest.approx(live.running, rel=0.15, abs=0.5), name
        assert each.queue == pytest.approx(live.queue, rel=0.15, abs=0.5), name
        assert each.usage == pytest.approx(live.usage, rel=0.15, abs=0.02), name
    verdicts = {name: diagnose(each).verdict for name, each in seen.items()}
    assert verdicts == dict.fromkeys(verdicts, verdict)
