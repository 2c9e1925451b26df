"""Counts of a batch: finished and failed requests, reasons of failures, tokens. The run and the
journal's recovery write them; progress and summary read them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from setpoint.batch.output_record import Error


@dataclass(slots=True)
class Reason:
    count: int
    first: Error


@dataclass(slots=True)
class Tally:
    num_requests: int
    num_done: int = 0
    """Requests answered or failed, in this run and those before it."""
    num_before: int = 0
    """The part of ``num_done`` that was in the output when this run began."""
    num_failed: int = 0
    reasons: dict[str, Reason] = field(default_factory=dict)
    """Error code -> its count, with the first example."""
    prompt_tokens: int = 0
    """Prompt tokens of the requests that this run answered; ``output_tokens`` counts the same
    requests."""
    output_tokens: int = 0
    open_output_tokens: int = 0
    """Output tokens of requests that are not answered yet, at the run's last check."""
    started_at: float = field(default_factory=time.monotonic)
    """When this run could send its first request."""

    def count(self, error: Error | None) -> None:
        """Count one finished request; ``error`` is set if it failed."""
        self.num_done += 1
        if error is not None:
            self.num_failed += 1
            reason = self.reasons.setdefault(error.code, Reason(0, error))
            reason.count += 1

    @property
    def elapsed_s(self) -> float:
        return max(time.monotonic() - self.started_at, 1e-9)

    @property
    def num_now(self) -> int:
        """Number of requests finished by this run."""
        return self.num_done - self.num_before

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds until the end; None while there is no basis for an estimate."""
        return (
            None
            if not self.num_now
            else (self.num_requests - self.num_done) * self.elapsed_s / self.num_now
        )

    def summary(self) -> str:
        """The summary at the end of a run: counts, speed, and a line per reason of failure."""
        num_ok = self.num_done - self.num_failed
        before = f", {self.num_before} of them in earlier runs" if self.num_before else ""
        head = (
            f"{self.num_done} of {self.num_requests} requests done{before}: {num_ok} answered,"
            f" {self.num_failed} failed."
        )
        lines = [head]
        if self.num_now:
            rates = (
                f"{self.prompt_tokens / self.elapsed_s:.0f} tok/s in,"
                f" {self.output_tokens / self.elapsed_s:.0f} tok/s out"
            )
            lines.append(
                f"This run: {self.num_now} in {self.elapsed_s:.1f} s,"
                f" {self.num_now / self.elapsed_s:.2f} requests/s, {rates}."
            )
        for code, reason in sorted(self.reasons.items(), key=lambda item: -item[1].count):
            lines.append(
                f"  {reason.count} × {code}, e.g. line {reason.first.line}: {reason.first.message}"
            )
        return "\n".join(lines)
