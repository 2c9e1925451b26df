"""What serves one model, as a record of its parts. They are made together, once
(``composition.compose``), and the record knows nothing of how they work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from setpoint.frontend.answering import Answering
from setpoint.frontend.checkpoint_names import Checkpoints
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.drain import Drain
from setpoint.frontend.health import Health
from setpoint.frontend.info import Info
from setpoint.frontend.live_settings import LiveSettings
from setpoint.frontend.residence import Residence
from setpoint.frontend.served_weights import ServedWeights
from setpoint.frontend.storage.storage import Storage
from setpoint.frontend.supervision import Supervisor
from setpoint.frontend.telemetry.request_events import RequestEvents
from setpoint.frontend.telemetry.watching import Watch
from setpoint.frontend.unread import Unread
from setpoint.frontend.workers import Worker
from setpoint.ipc.client import EngineClient

if TYPE_CHECKING:
    from setpoint.frontend.telemetry.metrics.exposition import Metrics


@dataclass(slots=True, frozen=True, kw_only=True, repr=False)
class Service:
    config: FrontendConfig
    engine: EngineClient
    answering: Answering
    storage: Storage | None
    """The folder of clients' files and batches; None: there are none."""
    health: Health
    info: Info
    live: LiveSettings
    weights: ServedWeights
    checkpoints: Checkpoints
    supervisor: Supervisor
    residence: Residence
    drain: Drain
    unread: Unread
    events: RequestEvents
    watch: Watch
    """Watches only while somebody runs it."""
    metrics: Metrics | None
    workers: Sequence[Worker] = ()
    at_end: Sequence[Callable[[], None]] = ()
    """Called once, in a thread, when all requests have ended: what waits to be sent elsewhere.
    They may block, and are not waited for for ever."""
