"""Counts how clients' requests ended. It outlives every engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestBook:
    """Counts since the frontend started, which ``/server_info`` shows. A sequence is one answer: a
    client's request with n = 2 has two."""

    num_sequences: int = 0
    """Sequences that ended, in whatever way; written at their end."""
    num_aborted: int = 0
    """Sequences among them that were aborted, including those of clients that went away."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """HTTP status -> number of requests answered with that error; written where errors get their
    shape."""
    truncated_prompts: int = 0
    """Prompts that --allow-auto-truncate shortened; written by ``Intake``."""
    lowered_limits: int = 0
    """Requests whose max_new_tokens --allow-auto-truncate lowered to fit the context; written by
    ``Intake``."""

    warned_bodies: int = 0
    """Bodies with unknown keys, which were ignored (written by ``BodyParser``), or with parts of a
    conversation that no model can read (``chat/passed_over``)."""

    unenforced_schemas: int = 0
    """Requests with a JSON schema of which a part is not enforced; written by ``Enforcement``."""

    lost_exports: int = 0
    """Lines that --export-metrics-to-file could not write; written by ``RequestExport``."""

    def count_refusal(self, status_code: int) -> None:
        status = str(status_code)
        self.refused[status] = self.refused.get(status, 0) + 1

    def info(self) -> dict[str, Any]:
        return asdict(self)
