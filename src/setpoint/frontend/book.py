"""What became of clients' requests, in numbers. It outlives every engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from setpoint.frontend.refusal import Refusal


@dataclass(slots=True)
class RequestBook:
    """Since the frontend started; ``/server_info`` shows it. A sequence is one answer: a client's
    request with n = 2 has two of them."""

    num_sequences: int = 0
    """Ended, whichever way; written at their ends."""
    num_aborted: int = 0
    """Of these; clients that went away included."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Requests that were answered with an error, by its HTTP status; written where errors get their
    shape."""
    truncated_prompts: int = 0
    """By --allow-auto-truncate, as is the next; written by ``Intake``."""
    lowered_limits: int = 0
    """max_new_tokens that did not fit the context."""

    def count_refusal(self, refusal: Refusal) -> None:
        status = str(refusal.status_code)
        self.refused[status] = self.refused.get(status, 0) + 1

    def info(self) -> dict[str, Any]:
        return asdict(self)
