"""Makes the service of a model from its configuration: each part gets those that it works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from setpoint.frontend.answering import Answering
from setpoint.frontend.bodies import BodyParser
from setpoint.frontend.checkpoint_names import Checkpoints, NoCheckpoints
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.drain import Drain
from setpoint.frontend.enforcement import Enforcement
from setpoint.frontend.health import Health
from setpoint.frontend.info import Info
from setpoint.frontend.intake import Intake
from setpoint.frontend.job_maker import JobMaker
from setpoint.frontend.live_options import LiveOptions
from setpoint.frontend.live_settings import LiveSettings
from setpoint.frontend.metrics_page import ServerFigures
from setpoint.frontend.pairing import KnownServers, Pairing
from setpoint.frontend.residence import AlwaysLoaded, Residence
from setpoint.frontend.served_weights import ServedWeights
from setpoint.frontend.service import Service
from setpoint.frontend.sessions import Sessions
from setpoint.frontend.storage.background import BackgroundBook
from setpoint.frontend.storage.responses import ResponseStore
from setpoint.frontend.storage.storage import Storage
from setpoint.frontend.supervision import NoSupervisor, Supervisor
from setpoint.frontend.telemetry.book import RequestBook
from setpoint.frontend.telemetry.latencies import Latencies
from setpoint.frontend.telemetry.limit_news import LimitNews
from setpoint.frontend.telemetry.metrics.metering import make_metrics
from setpoint.frontend.telemetry.request_events import Reader, RequestEvents
from setpoint.frontend.telemetry.request_log import RequestLog
from setpoint.frontend.telemetry.watching import Doctor, Watch
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.unread import Unread
from setpoint.frontend.workers import Worker
from setpoint.ipc.client import EngineClient

if TYPE_CHECKING:
    from setpoint.frontend.telemetry.metrics.exposition import Metrics


@dataclass(slots=True, frozen=True)
class ServerParts:
    """The parts that all models of a server have in common."""

    drain: Drain
    responses: ResponseStore
    storage: Storage | None

    @classmethod
    def of(cls, storage: Storage | None = None) -> ServerParts:
        """storage: where files and batches are kept, and responses in the background; None: files
        and batches are refused, and responses end with the server."""
        background = BackgroundBook() if storage is None else storage.background
        return cls(Drain(), ResponseStore(background), storage)


def compose(
    config: FrontendConfig,
    engine: EngineClient,
    text: TextProcessor,
    options: LiveOptions,
    *,
    of_server: ServerParts | None = None,
    residence: Residence | None = None,
    checkpoints: Checkpoints | None = None,
    supervisor: Supervisor | None = None,
    prefill_servers: KnownServers | None = None,
    pairing: Pairing | None = None,
    book: RequestBook | None = None,
    readers: Sequence[Reader] = (),
    make_doctor: Callable[[Info], Doctor] | None = None,
    workers: Sequence[Worker] = (),
    at_end: Sequence[Callable[[], None]] = (),
) -> Service:
    """of_server: None for the only model. prefill_servers, pairing: see JobMaker. book: the one
    that a reader counts in, too. workers, at_end: see Service."""
    of_server, residence = of_server or ServerParts.of(), residence or AlwaysLoaded()
    book = book or RequestBook()
    live, latencies, unread = LiveSettings(engine, options), Latencies(), Unread("the main port")
    info = Info(config.served_model_name, config.server_info, engine, live, book)
    watch = Watch(engine, latencies, None if make_doctor is None else make_doctor(info))
    figures = ServerFigures(engine, unread, pairing, residence)
    metrics = _metrics(config, engine, book, watch.news, figures)
    events = RequestEvents(book, RequestLog(lambda: live.frontend), readers)
    intake, drain = Intake(config, text, book), of_server.drain
    counts = None if metrics is None else metrics.requests
    jobs = JobMaker(
        config, engine, text, intake, drain, events, latencies, counts, pairing, prefill_servers
    )
    parser = BodyParser(book, config.refuse_unknown_keys, residence.is_shared)
    weights = ServedWeights(engine.orders, config.model_path, config.weight_version)
    enforcement, kept = Enforcement(book), of_server.responses
    return Service(
        config=config,
        engine=engine,
        answering=Answering(
            config, engine, text, weights, parser, intake, enforcement, jobs, Sessions(), kept
        ),
        storage=of_server.storage,
        health=Health(engine, config),
        info=info,
        live=live,
        weights=weights,
        checkpoints=checkpoints or NoCheckpoints(),
        supervisor=supervisor or NoSupervisor(),
        residence=residence,
        drain=drain,
        unread=unread,
        events=events,
        watch=watch,
        metrics=metrics,
        workers=workers,
        at_end=at_end,
    )


def _metrics(
    config: FrontendConfig,
    engine: EngineClient,
    book: RequestBook,
    news: LimitNews,
    figures: ServerFigures,
) -> Metrics | None:
    if config.metrics is None:
        return None
    return make_metrics(
        config.metrics,
        engine,
        book,
        news,
        model_name=config.served_model_name,
        context_len=config.context_len,
        of_server=figures.now,
    )
