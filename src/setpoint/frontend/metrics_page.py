"""The page of ``/metrics``: the series of all models, and those that the frontend's own parts
know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from setpoint.core.errors import RequestError
from setpoint.frontend.pairing import Pairing
from setpoint.frontend.residence import Residence
from setpoint.frontend.service import Service
from setpoint.frontend.telemetry.metrics.metering import page_of
from setpoint.frontend.unread import Unread
from setpoint.ipc.client import EngineClient


async def metrics_page(models: Sequence[Service], accept: str) -> tuple[bytes, str]:
    """The page, and its content type. accept: the client's header. Raises RequestError (404) if the
    server has no metrics."""
    metrics = [each.metrics for each in models if each.metrics is not None]
    if not metrics:
        raise RequestError(
            "Metrics are disabled; start the server with --enable-metrics.", status_code=404
        )
    return await page_of(metrics, accept)


@dataclass(slots=True, frozen=True)
class ServerFigures:
    engine: EngineClient
    unread: Unread
    pairing: Pairing | None
    residence: Residence

    def now(self) -> dict[str, Any]:
        """Series of /metrics -> labels -> value."""
        found: dict[str, Any] = {
            "setpoint:engine_restarts_left": {(): self.engine.lives.restarts.left},
            "setpoint:unread_answers": {(): self.unread.num_closed},
            "setpoint:unread_bytes": {(): self.unread.num_bytes},
        }
        if self.pairing is not None:
            up = self.pairing.up()
            found["setpoint:prefill_server_up"] = {(url,): value for url, value in up.items()}
            found["setpoint:prompts_without_prefill_server"] = {(): self.pairing.num_alone}
        if self.residence.is_shared:
            found["setpoint:model_loaded"] = {(): self.residence.state == "loaded"}
            found["setpoint:model_waiting_requests"] = {(): self.engine.num_waiting}
            found["setpoint:model_loads"] = {(): self.residence.num_loads}
            found["setpoint:model_load_seconds"] = {(): self.residence.load_s}
        return found
