"""A real Prometheus (Debian's package) scrapes a real server under load and answers every query of
the dashboard. Skipped where the binary is missing."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from dashboard import DEPLOY, of_sglang, queries

from setpoint_testing.server_process import ServerProcess, free_port, running_server, wait_until

PROMETHEUS = shutil.which("prometheus")
SEED = "Once upon a time there was a small engine that counted everything it did. "


@contextmanager
def scraping(folder: Path, target: str) -> Iterator[str]:
    """A Prometheus with the shipped configuration, but for its target and its pace."""
    assert PROMETHEUS is not None
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    command = [
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def asked(url: str, query: str) -> list[float]:
    """The values of an instant query."""
    try:
        response = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=10)
    except httpx.ConnectError:
        return []
    if response.status_code == 503:  # it is starting
        return []
    assert response.status_code == 200, (query, response.text)
    return [float(each["value"][1]) for each in response.json()["data"]["result"]]


def load(server: ServerProcess, over: threading.Event, number: int) -> None:
    """Requests until ``over`` is set: a shared prefix, lengths that differ."""
    count = 0
    while not over.is_set():
        count += 1
        text = SEED * (4 + number % 5) + f"Chapter {number}, {count}."
        body = {
            "text": text,
            "sampling_params": {"max_new_tokens": 16 + number, "ignore_eos": True},
            "stream": number % 2 == 0,
        }
        httpx.post(f"{server.url}/generate", json=body, timeout=60)


@pytest.mark.full
@pytest.mark.skipif(
    PROMETHEUS is None, reason="no prometheus here (Debian: apt-get install prometheus)"
)
def test_every_query_of_the_dashboard_is_answered(tmp_path: Path) -> None:
    """And the queries of SGLang's own dashboard. Prints the answers as a table (pytest -s)."""
    over = threading.Event()
    options = ["--enable-metrics", "--max-running-requests", "6", "--max-total-tokens", "1600"]
    with running_server(tmp_path / "server", *options) as server:
        threads = [
            threading.Thread(target=load, args=(server, over, number)) for number in range(10)
        ]
        for thread in threads:
            thread.start()
        try:
            with scraping(tmp_path, f"127.0.0.1:{server.port}") as prometheus:
                wait_until(lambda: asked(prometheus, 'up{job="setpoint"}') == [1.0])
                wait_until(
                    lambda: asked(prometheus, "sum(rate(sglang:num_requests_total[20s]))") > [0.1]
                )
                wait_until(lambda: bool(asked(prometheus, "sglang:num_running_reqs offset 20s")))
                rows = [(*each, asked(prometheus, each[2])) for each in (*queries(), *of_sglang())]
                alerts = httpx.get(f"{prometheus}/api/v1/rules", timeout=10).json()["data"]
        finally:
            over.set()
            for thread in threads:
                thread.join()
    for title, line, _, values in rows:
        print(f"{title:<45} | {line:<32} | {', '.join(f'{value:.4g}' for value in values[:8])}")
    unanswered = [(title, query) for title, _, query, values in rows if not values]
    assert not unanswered
    assert all(value == value for *_, values in rows for value in values), "a query gives NaN"
    (group,) = alerts["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
