"""The queries of the dashboard that ships in ``deploy/``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

DEPLOY = Path(__file__).parents[2] / "deploy"


def queries() -> Iterator[tuple[str, str, str]]:
    """Title of the panel, name of the line, and PromQL with its variables put in."""
    board = json.loads((DEPLOY / "grafana/setpoint.json").read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "20s").replace("$model", ".*")
            yield panel["title"], target["legendFormat"], expression


def of_sglang() -> Iterator[tuple[str, str, str]]:
    """The same for the series that SGLang's own dashboard reads, and its way to select them."""
    for name in ("num_running_reqs", "gen_throughput", "cache_hit_rate", "num_queue_reqs"):
        yield "SGLang's dashboard", name, f"sglang:{name}"
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds"):
        rates = [f"rate(sglang:{name}_{part}[20s])" for part in ("sum", "count")]
        yield "SGLang's dashboard", f"{name}, mean", f"avg({rates[0]} / {rates[1]})"
        buckets = f'sglang:{name}_bucket{{model_name=~"$model"}}'.replace("$model", ".*")
        yield "SGLang's dashboard", f"{name}, buckets", f"sum by (le) (increase({buckets}[20s]))"
