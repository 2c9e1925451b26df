"""Decides how many requests may be open: enough that the engine's queue never runs dry, few enough
for constant memory and cheap scheduling.

The guides call a ``#queue-req`` of 100 to 2,000 healthy. The engine is asked a few times per second
how many sequences run; that number plus QUEUE_TARGET may be open. Between two such calls the queue
shrinks only by the sequences that the engine newly admits, because each finished request is
replaced at once.

A batch beside clients who wait for their answers (``BackgroundGate``) takes only what they leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from setpoint.core.control import InternalState
from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.ipc.client import EngineClient

QUEUE_TARGET = 500
MAX_OPEN_BYTES = 64 << 20
"""Most bytes of input lines whose requests are open."""
MAX_HELD_BYTES = 64 << 20
"""Most bytes of finished records that wait for their turn."""
LOOK_S = 0.25
BACKGROUND_QUEUE = 32
"""Most requests of a batch in the background that may wait for memory in the engine, ahead of a
client's next request."""
RESERVED_SHARE = 8
"""One of this many slots is kept free of a batch in the background, so that a client's next request
finds one."""


class EngineView:
    """The state that the engines last reported, together."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.num_running = 0
        self.num_queued = 0
        self.token_usage = 0.0
        """Share of the KV pools that is neither free nor evictable."""
        self.max_running = 0
        """How many sequences may run at once; 0 until the engine has reported."""
        self.has_ended = False
        """Whether there is no engine to ask any more."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after each look at the engine."""

    @property
    def num_open(self) -> int:
        """Requests of everybody that are open now."""
        return self._client.num_open

    async def watch(self, changed: asyncio.Event) -> None:
        """Update the view until cancelled, or until the engine has ended; its requests report that.
        While an engine does not answer, the view stays as it was."""
        while not self.has_ended:
            try:
                states = await self._client.on_all(lambda line: line.get_state())
            except (EngineDeadError, RequestError):
                self.has_ended = self._client.lives.has_ended
            else:
                self._take(states)
                self.on_change()
            changed.set()
            await asyncio.sleep(LOOK_S)

    def _take(self, states: Sequence[InternalState]) -> None:
        self.num_running = sum(state.num_running for state in states)
        self.num_queued = sum(state.num_queued for state in states)
        self.max_running = sum(state.settings.max_running_requests for state in states)
        self.token_usage = sum(state.pool.usage for state in states) / len(states)


class BatchGate:
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
        return (
            self.num_seqs < self._view.num_running + QUEUE_TARGET
            and self.num_bytes + num_bytes <= MAX_OPEN_BYTES
            and held_bytes <= MAX_HELD_BYTES
        )

    def opened(self, num_seqs: int, num_bytes: int) -> None:
        self.num_seqs += num_seqs
        self.num_bytes += num_bytes

    def closed(self, num_seqs: int, num_bytes: int) -> None:
        self.num_seqs -= num_seqs
        self.num_bytes -= num_bytes
        self.changed.set()


class BackgroundGate(BatchGate):
    """Lets a batch have the slots that nobody else wants: it opens requests only while the engine's
    queue is short, and leaves a share of the slots free."""

    def __init__(self, view: EngineView) -> None:
        super().__init__(view)
        self._num_unseen = 0
        """Sequences opened, less those closed, since the engine was last asked."""
        view.on_change = self._forget_unseen

    def has_room(self, num_bytes: int, *, held_bytes: int) -> bool:
        """Whether one more request may be opened. With no engine it may, because it is the request
        that finds the reason."""
        view = self._view
        if view.has_ended:
            return True
        num_open = max(view.num_open, self.num_seqs)
        return (
            num_open < max(1, view.max_running - view.max_running // RESERVED_SHARE)
            and view.num_queued + self._num_unseen < BACKGROUND_QUEUE
            and self.num_bytes + num_bytes <= MAX_OPEN_BYTES
        )

    def opened(self, num_seqs: int, num_bytes: int) -> None:
        super().opened(num_seqs, num_bytes)
        self._num_unseen += num_seqs

    def closed(self, num_seqs: int, num_bytes: int) -> None:
        self._num_unseen -= num_seqs
        super().closed(num_seqs, num_bytes)

    def _forget_unseen(self) -> None:
        self._num_unseen = 0
