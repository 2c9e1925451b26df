"""Makes the job of the requests of one client body, whichever API read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from setpoint.core.errors import RequestError
from setpoint.core.request import Request
from setpoint.frontend.arrival import arrival
from setpoint.frontend.bootstrap_rooms import names_bootstrap_room, with_bootstrap_rooms
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.drain import Drain, without_weights
from setpoint.frontend.hidden_states import check_hidden_states
from setpoint.frontend.intake import Intake
from setpoint.frontend.jobs import Job
from setpoint.frontend.pairing import KnownServers, Pairing
from setpoint.frontend.routing import routed
from setpoint.frontend.sessions import SessionTurn
from setpoint.frontend.telemetry.latencies import Latencies
from setpoint.frontend.telemetry.metrics.requests import RequestMetrics
from setpoint.frontend.telemetry.request_events import RequestEvents
from setpoint.frontend.text.processor import TextProcessor
from setpoint.ipc.client import EngineClient


@dataclass(slots=True, frozen=True)
class JobMaker:
    config: FrontendConfig
    engine: EngineClient
    text: TextProcessor
    intake: Intake
    drain: Drain
    events: RequestEvents
    latencies: Latencies
    metrics: RequestMetrics | None
    pairing: Pairing | None
    """Finds prefill servers for requests without a bootstrap room."""
    prefill_servers: KnownServers | None
    """The prefill servers that a decode server knows."""

    def make(
        self,
        requests: Sequence[Request],
        *,
        received: dict[str, Any],
        api: str = "",
        no_logs: bool = False,
        turn: SessionTurn | None = None,
        tool_schema: str = "",
    ) -> Job:
        """The job of the requests of one client body, ``received``. api: the API of the body, for
        the request log. no_logs: keep the requests out of that log. turn: the turn of a session
        that the one request is. tool_schema: see Job. Raises RequestError: 400 if together they ask
        for too much, 503 if the server drains or its weights are lost.
        """
        self.drain.check()
        if self.engine.orders.why_no_weights:
            raise RequestError(without_weights(self.engine), status_code=503)
        paired = None
        if self.pairing is not None and not names_bootstrap_room(received, self.config.sharing):
            paired = self.pairing.pair(arrival().path, requests, received)
            received = received if paired is None else paired.body
        requests = routed(
            with_bootstrap_rooms(requests, received, self.config.sharing, self.prefill_servers),
            received,
            num_ranks=len(self.engine.lines),
            by_room=self.config.follows_bootstrap_room,
        )
        self.intake.check_logprobs(requests)
        check_hidden_states(requests, self.config)
        make = partial(
            Job,
            self.engine,
            self.text.known_tokenizer,
            requests,
            metrics=self.metrics,
            latencies=self.latencies,
            tool_schema=tool_schema,
        )
        is_logged = not no_logs and self.events.log.received(requests, received, api)
        started, finished = self._started, partial(self.events.ended, is_logged=is_logged)
        if paired is not None:
            return make(on_start=paired.noting(started), on_finish=paired.recording(finished))
        if turn is not None:
            return make(on_start=turn.noting(started), on_finish=turn.recording(finished))
        return make(on_start=started, on_finish=finished)

    def _started(self, job: Job) -> None:
        self.events.roster.started(job.outputs)
