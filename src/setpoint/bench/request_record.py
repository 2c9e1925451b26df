"""Plain data between datasets, clients and metrics: what is asked of a server, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Prompt:
    """One request of a dataset."""

    content: str | list[int]
    """The prompt as text, or as ids."""
    num_tokens: int
    """Number of tokens according to this side's tokenizer."""
    output_len: int
    """Number of output tokens wanted; 0 for an embedding."""


@dataclass(slots=True)
class RequestRecord:
    """One request's course. Its backend writes it while the answer arrives. Times are
    ``time.perf_counter`` seconds."""

    prompt: Prompt
    started_at: float = 0.0
    ended_at: float = 0.0
    times: list[float] = field(default_factory=list)
    """When tokens arrived: one entry for each chunk that brought any."""
    counts: list[int] = field(default_factory=list)
    """Number of tokens in each of these chunks; 1 if the server does not say."""
    pieces: list[str] = field(default_factory=list)
    num_outputs: int | None = None
    """Number of output tokens by the server's own count."""
    num_prompt: int | None = None
    """Number of prompt tokens by the server's own count."""
    cached: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that the server did not compute, by the place it had them in: device, host,
    storage."""
    is_finished: bool = False
    """True once the server has said that the answer is complete."""
    error: str = ""
    """The reason of a failure. No figure includes failed requests."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add_tokens(self, now: float, count: int) -> None:
        self.times.append(now)
        self.counts.append(count)

    def fail(self, reason: str) -> None:
        """Note a failure; the first reason is kept."""
        self.error = self.error or " ".join(reason.split())[:300]
