"""``/metrics`` of a real server: the engine and the frontend agree on every series, and a dead
engine leaves its figures."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from setpoint.observe.catalogue import SERIES
from setpoint.testing.server import running_server, wait_until


def page(url: str) -> dict[str, float]:
    """Name of a sample -> the sum of its values."""
    response = httpx.get(f"{url}/metrics", timeout=30)
    assert response.status_code == 200
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_a_real_server_has_every_series(tiny_model: Path, tmp_path: Path) -> None:
    options = ["--model-path", str(tiny_model), "--dtype", "float32", "--enable-metrics"]
    few = ["--max-running-requests", "1", "--skip-server-warmup"]
    with running_server(tmp_path / "server", *options, *few) as server:
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        answers = server.generate(text=["a b c", "d e f"], sampling_params=sampling)
        found = page(server.url)
        shown = {re.sub("_(bucket|sum|count)$", "", name) for name in found}
        assert {series.shown_name for series in SERIES} - shown == set()
        assert found["sglang:generation_tokens_total"] == 16
        assert found["sglang:inter_token_latency_seconds_count"] == 14
        assert found["sglang:queue_time_seconds_count"] == 2
        assert found["setpoint:queue_refusals_total"] > 0
        assert found["sglang:startup_time_seconds"] > 0
        waits = [answer["meta_info"]["queue_time"] for answer in answers]
        assert sum(waits) <= found["sglang:queue_time_seconds_sum"] + 1e-6
        assert max(waits) > 0
        assert all(answer["meta_info"]["prefill_finished_time"] > 0 for answer in answers)
        assert server.engine is not None
        server.engine.suspend()
        wait_until(lambda: page(server.url)["setpoint:engine_up"] == 0)
        assert page(server.url)["sglang:generation_tokens_total"] == 16
        assert page(server.url)["sglang:num_pages"] == found["sglang:num_pages"]
        server.engine.resume()
        wait_until(lambda: page(server.url)["setpoint:engine_up"] == 1)
