"""Decides how many requests may be open: enough that the engine's queue never runs dry, few enough
for constant memory and cheap scheduling.

The guides call a ``#queue-req`` of 100 to 2,000 healthy. The engine is asked a few times per second
how many sequences run; that number plus QUEUE_TARGET may be open. Between two such calls the queue
shrinks only by the sequences that the engine newly admits, because each finished request is
replaced at once.
"""

from __future__ import annotations

import asyncio
from typing import Any

from setpoint.core.errors import EngineDeadError
from setpoint.frontend.ipc.client import EngineClient

QUEUE_TARGET = 500
MAX_OPEN_BYTES = 64 << 20
"""Most bytes of input lines whose requests are open."""
MAX_HELD_BYTES = 64 << 20
"""Most bytes of finished records that wait for their turn."""
LOOK_S = 0.25


class EngineView:
    """The state that the engine last reported."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.num_running = 0
        self.num_queued = 0
        self.token_usage = 0.0
        """Share of the KV pool that is neither free nor evictable."""

    async def watch(self, changed: asyncio.Event, *, timeout_s: float) -> None:
        """Update the view until cancelled, or until the engine is dead or silent for ``timeout_s``;
        its requests report that."""
        while True:
            try:
                reply = await self._client.call("state", timeout_s=timeout_s)
            except EngineDeadError:
                return
            self._take(reply.value)
            changed.set()
            await asyncio.sleep(LOOK_S)

    def _take(self, state: dict[str, Any]) -> None:
        self.num_running, self.num_queued = state["num_running"], state["num_queued"]
        pool = state["pool"]
        self.token_usage = 1 - (pool["free"] + pool["evictable"]) / pool["total"]


class Gate:
    """Counts what is open. ``changed`` is set whenever a request that had to wait should check
    again."""

    def __init__(self, view: EngineView) -> None:
        self._view = view
        self.changed = asyncio.Event()
        self.num_seqs = 0
        self.num_bytes = 0

    def has_room(self, num_bytes: int, *, held_bytes: int) -> bool:
        """Whether one more request may be opened; the first always may."""
        if not self.num_seqs:
            return True
        fits = (
            self.num_seqs < self._view.num_running + QUEUE_TARGET
            and self.num_bytes + num_bytes <= MAX_OPEN_BYTES
        )
        return fits and held_bytes <= MAX_HELD_BYTES

    def opened(self, num_seqs: int, num_bytes: int) -> None:
        self.num_seqs += num_seqs
        self.num_bytes += num_bytes

    def closed(self, num_seqs: int, num_bytes: int) -> None:
        self.num_seqs -= num_seqs
        self.num_bytes -= num_bytes
        self.changed.set()
