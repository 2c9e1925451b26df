"""What is asked of a server and what it did: the plain data between datasets, clients and
metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Prompt:
    """One request of a dataset."""

    content: str | list[int]
    """Text, or ids."""
    num_tokens: int
    """By this side's tokenizer."""
    output_len: int
    """Tokens wanted; 0 for an embedding."""


@dataclass(slots=True)
class Record:
    """One request's life, written by its backend while the answer comes. Times are
    ``time.perf_counter`` seconds."""

    prompt: Prompt
    started_at: float = 0.0
    ended_at: float = 0.0
    times: list[float] = field(default_factory=list)
    """When tokens came, one entry per chunk that brought any."""
    counts: list[int] = field(default_factory=list)
    """How many each brought; 1 where the server does not say."""
    pieces: list[str] = field(default_factory=list)
    num_outputs: int | None = None
    """By the server's own count."""
    num_prompt: int | None = None
    """By the server's own count."""
    cached: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that the server did not compute, by where they were: device, host, storage."""
    is_finished: bool = False
    """The server has said that the answer is complete."""
    error: str = ""
    """Why it failed. Nothing of a failed request counts."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def came(self, now: float, count: int) -> None:
        self.times.append(now)
        self.counts.append(count)

    def fail(self, reason: str) -> None:
        """The first reason stays."""
        self.error = self.error or " ".join(reason.split())[:300]
