"""What is measured of one sequence of a client's request: counts, times, its end. Logs, spans,
tables and metrics are made from this."""

from __future__ import annotations

import time
from collections.abc import Mapping

from setpoint.core.messages import Finish, Timing
from setpoint.core.request import Request


class MeasuredSequence:
    """Written by the Job that runs the sequence; everybody else reads."""

    def __init__(
        self, request: Request, *, arrived_at: float, headers: Mapping[str, str], path: str
    ) -> None:
        self.request = request
        self.headers = headers
        """The headers of the client's request."""
        self.path = path
        """The path of its URL; "" for a request that came without HTTP."""
        self._texts: list[str] = []
        self.output_ids: list[int] = []
        self.finish: Finish | None = None
        self.num_prompt = len(request.prompt_ids) // 4
        self.num_outputs = 0
        self.num_cached = 0
        self.num_loaded = 0
        """How many of the cached tokens came from cache tiers; of these, ``num_from_host`` from
        host memory."""
        self.num_from_host = 0
        self.num_retractions = 0
        self.arrived_at = arrived_at
        """Seconds of time.perf_counter(), like the times below; None for what has not happened."""
        self.submitted_at: float | None = None
        self.held_s = 0.0
        """How long it has waited for its model to be loaded."""
        self.seq_id: int | None = None
        """The number of the submission."""
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.timing: Timing | None = None
        """The engine's part of the time to the first token."""

    @property
    def text(self) -> str:
        """Text that is final: no half characters, and nothing that may still turn out to be a stop
        string."""
        if len(self._texts) > 1:
            self._texts[:] = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def is_complete(self) -> bool:
        """Whether it has ended by itself: it was not aborted, and its client stayed."""
        return self.finish is not None and self.finish.type != "abort"

    @property
    def e2e_s(self) -> float:
        return (self.finished_at or time.perf_counter()) - self.arrived_at
