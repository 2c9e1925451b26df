"""Makes the server's metrics from its configuration."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from setpoint.frontend.book import RequestBook
from setpoint.frontend.config import FrontendConfig, MetricsConfig
from setpoint.frontend.ipc.client import EngineClient
from setpoint.frontend.limit_news import LimitNews
from setpoint.frontend.metrics.engines import EngineFigures
from setpoint.frontend.metrics.http import HttpMetrics
from setpoint.frontend.metrics.requests import RequestMetrics

if TYPE_CHECKING:
    from setpoint.frontend.metrics.exposition import Metrics


def make_metrics(
    config: FrontendConfig,
    metrics: MetricsConfig,
    client: EngineClient,
    book: RequestBook,
    news: LimitNews,
) -> Metrics:
    # Here, because prometheus_client takes a tenth of a second that most starts can save.
    from setpoint.frontend.metrics.exposition import Metrics

    def server() -> dict[str, Any]:
        return {
            "sglang:startup_time_seconds": {
                (phase,): seconds for phase, seconds in metrics.startup_s.items()
            },
            "sglang:process_cpu_seconds": {("frontend",): time.process_time()},
            "setpoint:truncated_prompts": {(): book.truncated_prompts},
            "setpoint:lowered_limits": {(): book.lowered_limits},
            "setpoint:lost_exports": {(): book.lost_exports},
            "setpoint:warned_requests": {(): book.warned_bodies},
            "setpoint:binding_limit": {(limit,): on for limit, on in news.binding.items()},
        }

    return Metrics(
        model_name=config.served_model_name,
        extra_labels=metrics.extra_labels,
        client=client,
        engines=EngineFigures(context_len=config.context_len, page_size=metrics.page_size),
        requests=RequestMetrics(
            buckets=metrics.buckets,
            label_names=metrics.custom_labels,
            labels_header=metrics.labels_header,
        ),
        http=HttpMetrics(),
        server=server,
    )
