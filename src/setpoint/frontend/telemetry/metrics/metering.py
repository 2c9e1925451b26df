"""Makes the server's metrics from its configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from setpoint.frontend.telemetry.book import RequestBook
from setpoint.frontend.telemetry.limit_news import LimitNews
from setpoint.frontend.telemetry.metrics.engines import RankFigures
from setpoint.frontend.telemetry.metrics.http_counts import HttpMetrics
from setpoint.frontend.telemetry.metrics.requests import RequestMetrics
from setpoint.ipc.client import EngineClient

if TYPE_CHECKING:
    from setpoint.frontend.telemetry.metrics.exposition import Metrics


@dataclass(slots=True, frozen=True)
class MetricsConfig:
    """What ``/metrics`` shows."""

    extra_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels for every series of the scheduler and of requests."""
    custom_labels: Sequence[str] = ()
    """Names of the labels that a client may give the series of its request."""
    labels_header: str = "x-custom-labels"
    """The header in which it does."""
    buckets: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Name of a histogram -> its upper bounds, where they are not the usual ones."""
    engine_type: str = "unified"
    """Which part of a request the server computes: all of it, its prefill or its decode."""
    page_size: int = 1
    overlap: bool = False
    """Whether steps are planned while the one before still runs."""
    startup_s: Mapping[str, float] = field(default_factory=dict)
    """Phase of the start -> its seconds."""
    of_several: bool = False
    """Whether the server has other models, whose series are on the same page."""


def make_metrics(
    config: MetricsConfig,
    client: EngineClient,
    book: RequestBook,
    news: LimitNews,
    *,
    model_name: str,
    context_len: int,
    of_server: Callable[[], dict[str, Any]],
) -> Metrics:
    """of_server: returns series of the server -> labels -> value, besides those known here."""
    # Here, because prometheus_client takes a tenth of a second that most starts can save.
    from setpoint.frontend.telemetry.metrics.exposition import Metrics

    def server() -> dict[str, Any]:
        return {
            **of_server(),
            "sglang:startup_time_seconds": {
                (phase,): seconds for phase, seconds in config.startup_s.items()
            },
            "sglang:process_cpu_seconds": {("tokenizer",): time.process_time()},
            "setpoint:truncated_prompts": {(): book.truncated_prompts},
            "setpoint:lowered_limits": {(): book.lowered_limits},
            "setpoint:lost_exports": {(): book.lost_exports},
            "setpoint:warned_requests": {(): book.warned_bodies},
            "setpoint:unenforced_schemas": {(): book.unenforced_schemas},
            "setpoint:binding_limit": {(limit,): on for limit, on in news.binding.items()},
        }

    return Metrics(
        model_name=model_name,
        engine_type=config.engine_type,
        extra_labels=config.extra_labels,
        client=client,
        figures=partial(
            RankFigures,
            context_len=context_len,
            page_size=config.page_size,
            overlap=config.overlap,
        ),
        requests=RequestMetrics(
            buckets=config.buckets,
            label_names=config.custom_labels,
            labels_header=config.labels_header,
        ),
        http=HttpMetrics(),
        server=server,
        of_several=config.of_several,
    )


async def page_of(models: Sequence[Metrics], accept: str) -> tuple[bytes, str]:
    """The page with the series of all models, and its content type (``exposition.scrape``)."""
    from setpoint.frontend.telemetry.metrics.exposition import scrape  # as in ``make_metrics``

    return await scrape(models, accept)
