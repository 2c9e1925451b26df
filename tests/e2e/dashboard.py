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
