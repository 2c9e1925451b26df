"""Scrapes of ``/metrics`` in the tests of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from setpoint.observe.engine_metrics import EngineMetrics
from setpoint.observe.figures import Figures
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
Found = dict[tuple[str, frozenset[tuple[str, str]]], float]
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def engine(**options: Any) -> FakeEngine:
    metrics = EngineMetrics(Figures(decode_log_interval=40)).report()
    return FakeEngine(**{"metrics": metrics, **options})


async def scrape(server: Any, **headers: str) -> Found:
    response = await server.http.get("/metrics", headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def value(found: Found, name: str, **labels: str) -> float:
    """The one sample of this name with at least these labels."""
    matching = [
        value for (each, own), value in found.items() if each == name and labels.items() <= own
    ]
    assert len(matching) == 1, (name, labels, matching)
    return matching[0]
