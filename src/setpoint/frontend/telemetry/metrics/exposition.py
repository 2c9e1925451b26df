"""``/metrics`` in Prometheus' text format, or in OpenMetrics if the client prefers it. Everything
is counted elsewhere; ``prometheus_client`` writes it down. Imported only by a server with
--enable-metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.frontend.telemetry.metrics.engines import RankFigures
from setpoint.frontend.telemetry.metrics.http_counts import HttpMetrics
from setpoint.frontend.telemetry.metrics.requests import RequestMetrics
from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine
from setpoint.observe.catalogue import SERIES
from setpoint.observe.series import Histogram, Kind, Scope, Series

ANSWER_S = 2.0
"""How long a scrape waits for the engine, which answers between two steps. After that it shows what
the engine said before."""

OPEN_METRICS = "application/openmetrics-text"

Samples = Mapping[tuple[str, ...], Any]
"""Values of a series' labels besides the common ones -> a number or a Histogram."""


OF_THE_PROCESS = frozenset(
    {
        "sglang:http_requests",
        "sglang:http_responses",
        "sglang:http_requests_active",
        "sglang:process_cpu_seconds",
    }
)
"""Series that belong to no model, although each model's Metrics have them."""


class Metrics:
    """All series of one model."""

    def __init__(
        self,
        *,
        model_name: str,
        engine_type: str = "unified",
        extra_labels: Mapping[str, str],
        client: EngineClient,
        figures: Callable[[], RankFigures],
        requests: RequestMetrics,
        http: HttpMetrics,
        server: Callable[[], Mapping[str, Samples]],
        of_several: bool = False,
    ) -> None:
        """extra_labels: added to every series of the scheduler and of requests. figures: makes
        those of a rank. server: the frontend's other samples, by the name of their series.
        of_several: whether these name their model, too."""
        common = {"model_name": model_name, "engine_type": engine_type}
        ranks = dict.fromkeys(("tp_rank", "pp_rank", "moe_ep_rank"), "0")
        self._labels: dict[Scope, dict[str, str]] = {
            Scope.SCHEDULER: common | ranks | dict(extra_labels),
            Scope.REQUEST: common | dict(extra_labels),
            Scope.SERVER: {"model_name": model_name} if of_several else {},
        }
        self._client = client
        self._make_figures = figures
        self._figures: dict[int, RankFigures] = {}
        """Data-parallel rank -> the figures of its engines."""
        self.requests = requests
        self.http = http
        self._server = server
        self._taken_at: float | None = None
        """time.monotonic() when the engine last answered."""

    async def ask(self) -> None:
        """Get the engines' present figures. An engine that is dead, stopped or silent leaves its
        last ones."""
        lines = [line for line in self._client.lines if line.life.is_ready]
        await asyncio.gather(*map(self._ask_one, lines))

    async def _ask_one(self, line: EngineLine) -> None:
        try:
            state = await line.get_state(timeout_s=ANSWER_S)
        except (EngineDeadError, RequestError):
            return
        figures = self._figures.get(line.rank)
        if figures is None:
            figures = self._figures[line.rank] = self._make_figures()
        figures.take(line, line.facts, state)
        self._taken_at = time.monotonic()

    def families(self) -> Iterator[Metric]:
        """Runs while requests go on counting: it copies each dictionary before it walks over it."""
        found = {**self._server(), **self.http.samples(), **self._of_engines()}
        several = len(self._client.lines) > 1
        ranks = ("dp_rank",) if several else ()
        for rank, figures in sorted(self._figures.items()):
            for name, own in figures.samples().items():
                if several:
                    own = {(*labels, str(rank)): value for labels, value in own.items()}
                found[name] = {**found.get(name, {}), **own}
        for series in SERIES:
            if series.scope is Scope.REQUEST:
                names = self.requests.label_names
                samples: Samples = {
                    (*own, *custom): value
                    for custom, counts in list(self.requests.by_labels.items())
                    for own, value in counts[series.name].items()
                }
            else:
                names = ranks if series.scope is Scope.SCHEDULER else ()
                samples = found.get(series.name, {})
            if samples:
                yield self._family(series, names, samples)

    def _of_engines(self) -> dict[str, Samples]:
        keys, blocks = self.requests.open_keys, self._client.blocks
        standings, lives = self._client.standings(), self._client.lives
        values: dict[str, float] = {
            "sglang:routing_keys_active": len(keys) - ("" in keys),
            "setpoint:engine_up": self._client.is_ready,
            "setpoint:standby_ready": lives.standby == "ready",
            "setpoint:engine_starts": sum(each.num_restarts + 1 for each in standings),
            "setpoint:standby_deaths": lives.num_standby_deaths,
            "setpoint:kv_event_batches": 0 if blocks is None else blocks.num_published,
            "setpoint:kv_event_overruns": 0 if blocks is None else blocks.num_overruns,
        }
        if self._taken_at is not None:
            values["setpoint:engine_figures_age_seconds"] = time.monotonic() - self._taken_at
        found: dict[str, Samples] = {name: {(): value} for name, value in values.items()}
        found["setpoint:rank_up"] = {
            (str(each.dp_rank),): each.state == "ready" for each in standings
        }
        return found

    def _family(self, series: Series, custom: Iterable[str], samples: Samples) -> Metric:
        common = {} if series.name in OF_THE_PROCESS else self._labels[series.scope]
        names = (*common, *series.labels, *custom)
        family: Any = _FAMILIES[series.kind](series.name, series.help, labels=names)
        for values, value in samples.items():
            labels = (*common.values(), *values)
            if isinstance(value, Histogram):
                family.add_metric(labels, _cumulative(value), value.sum)
            else:
                family.add_metric(labels, value)
        found: Metric = family
        return found


async def scrape(models: Sequence[Metrics], accept: str) -> tuple[bytes, str]:
    """The page with the series of all models, and its content type. accept: the client's header.
    Never fails because of an engine."""
    await asyncio.gather(*(each.ask() for each in models))
    # In a thread, because custom labels can make it tens of milliseconds of work.
    return await asyncio.to_thread(_written, models, accept)


def _written(models: Sequence[Metrics], accept: str) -> tuple[bytes, str]:
    registry = CollectorRegistry()
    registry.register(_Once(models))
    if OPEN_METRICS in accept:
        # The library would write "sglang_" for "sglang:" in this format, although a colon is
        # allowed in both.
        page = _open_metrics(registry, openmetrics.ALLOWUTF8, "1.0.0")
        return page, f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class _Once(Collector):
    """A collector that makes the families anew for each scrape; of several models, a family has the
    samples of all."""

    def __init__(self, models: Sequence[Metrics]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        first, *others = self._models
        found = {family.name: family for family in first.families()}
        for each in others:
            for family in each.families():
                known = found.setdefault(family.name, family)
                if known is not family and family.name not in OF_THE_PROCESS:
                    known.samples += family.samples
        return found.values()


_open_metrics: Callable[[CollectorRegistry, str, str], bytes] = openmetrics.generate_latest

_FAMILIES: dict[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


def _cumulative(histogram: Histogram) -> list[tuple[str, int]]:
    """Upper bound -> number of values up to it."""
    found, total = [], 0
    bounds = (*map(str, map(float, histogram.bounds)), "+Inf")
    for bound, count in zip(bounds, histogram.counts, strict=True):
        total += count
        found.append((bound, total))
    return found
