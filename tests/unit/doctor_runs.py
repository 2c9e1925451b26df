"""Runs of the real scheduler over a simulated engine, kept as every reader of the doctor could find
them: log, recording, ``/metrics`` and the moments of the engine itself."""

from __future__ import annotations

import asyncio
import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from setpoint.commands.replay_command import replay
from setpoint.config.command_options import ReplayOptions
from setpoint.core.control import EngineFacts, GetState, InternalState, MemoryUsage
from setpoint.core.moments import Moment
from setpoint.core.records import Record
from setpoint.core.settings import Settings
from setpoint.frontend.telemetry.metrics.engines import RankFigures
from setpoint.frontend.telemetry.metrics.exposition import Metrics, scrape
from setpoint.frontend.telemetry.metrics.http_counts import HttpMetrics
from setpoint.frontend.telemetry.metrics.requests import RequestMetrics
from setpoint.ipc.client import EngineClient
from setpoint.observe.logline import ready_line
from setpoint.observe.readers import EngineReaders
from setpoint.observe.tee import Tee
from setpoint.recording.writer import RecordingConfig, start_recording
from setpoint.scheduler.cache.manager import CacheConfig
from setpoint_testing.simulated import CostModel, Engine, Simulation
from setpoint_testing.traffic import Arrivals, Load, Traffic, uniform

POOL = 20_000
CONTEXT = 4096
BEGAN_AT = 1_760_000_000.0
SHORT = Load(uniform(100, 400), uniform(20, 60), 256)
LONG = Load(uniform(1500, 2000), uniform(10, 20), 1500)


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
    return Run(_log_of(recording, used), recording, pages, readers.moments.since(0).moments, used)


def _metrics() -> Metrics:
    return Metrics(
        model_name="m",
        extra_labels={},
        client=EngineClient(),
        figures=lambda: RankFigures(context_len=CONTEXT, page_size=1),
        requests=RequestMetrics(),
        http=HttpMetrics(),
        server=dict,
    )


def _page(
    metrics: Metrics, simulation: Simulation, readers: EngineReaders, settings: Settings
) -> str:
    state = simulation._loop._answer(GetState(1))
    assert isinstance(state, InternalState)
    report = readers.report(MemoryUsage(weight=0.25, kvcache=0.5), None)
    facts = EngineFacts(
        max_total_num_tokens=POOL,
        max_running_requests=settings.max_running_requests,
        max_req_input_len=CONTEXT,
    )
    figures = metrics._figures[0] = metrics._make_figures()
    figures.take("the engine", facts, msgspec.structs.replace(state, report=report))
    page, _ = asyncio.run(scrape([metrics], ""))
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
