"""Estimates how the time of a decode step grows with its batch, and what that means for
throughput."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class DecodeStep:
    """The mean decode step of a line or moment."""

    seconds: float
    """Time from one step to the next, with the prefills between them."""
    running: float
    prompt_tokens: float
    """Prompt tokens computed between two steps."""


@dataclass(slots=True, frozen=True)
class FixedShare:
    """The share s of a step's time that does not grow with the batch (reading the weights). With f
    times as many requests a step takes s + f (1 - s) times as long, for f times the tokens."""

    running: float
    """The running requests for which the share is given."""
    share: float
    low: float
    high: float
    num_steps: int = 0
    """Number of observations that it is fitted to; 0: only the device is known."""
    scatter: float = 0.0
    """Share by which the means of two sources like this one differ by chance, at two standard
    deviations: as its steps vary for reasons that are neither the batch nor the prompts."""

    @property
    def is_known(self) -> bool:
        return self.high - self.low <= KNOWN

    def slowdowns(self, growth: float) -> tuple[float, float, float]:
        """The factor of a step's time with ``growth`` times as many requests: least, expected,
        most. Always between 1 (s = 1) and ``growth`` (s = 0)."""
        shares = (self.high, self.share, self.low)
        least, expected, most = sorted(share + growth * (1 - share) for share in shares)
        return least, expected, most

    def gains(self, growth: float) -> tuple[float, float, float]:
        """The factor of the throughput with ``growth`` times as many requests: least, expected,
        most."""
        least, expected, most = self.slowdowns(growth)
        return growth / most, growth / expected, growth / least


KNOWN = 0.6
"""Largest width of the interval of s at which a step's time counts as measured."""
SPREAD = 0.2
"""Standard deviation of the share if only the device is known: the batch below may be three times
as large or as small."""
SPREAD_UNKNOWN = 0.29
"""Standard deviation of the share if nothing is known: that of a uniform distribution."""
STEP_NOISE = 0.1
"""Least standard deviation of a step's time that neither the batch nor the prompts explain."""
MOST_SCATTER = 0.5
EVEN_BATCH = {"gpu": 64.0, "cpu": 10.0}
"""Batch whose own work takes as long as reading the weights. On a GPU: 16 GB of weights and 0.26 GB
of keys and values for each request, as those of 2000 tokens of a model of 8 billion parameters. On
a CPU: steps of 1 and 64 rows of the built-in model took 9.22 and 60.1 ms on two cores
(docs/notebook.md), which is 8.4 ms and 0.81 ms for each row."""
PROMPT_COST = {"cpu": 0.7}
"""What a prompt token adds to a step, in parts of what an output token does: its products are the
same, but they have more rows. Measured like EVEN_BATCH: 4.73 s for 64 prompts of 128 tokens."""
CHUNK_SPREAD = 3.0
"""The fixed cost of a chunk may be so many times as large: decode steps run between chunks."""


def even_batch(device: str | None, running: float) -> float:
    """The batch of EVEN_BATCH for the device; for an unknown device, the present batch."""
    return EVEN_BATCH.get(device or "", running)


def chunk_gains(size: float, value: float) -> tuple[float, float, float]:
    """The factor of the input throughput on a CPU with chunks of ``value`` instead of ``size``
    tokens: least, expected, most. The fixed cost of a chunk is that of reading the weights."""
    fixed = EVEN_BATCH["cpu"] / PROMPT_COST["cpu"]

    def gain(cost: float) -> float:
        return (1 + cost / size) / (1 + cost / value)

    return 1.0, gain(fixed), gain(CHUNK_SPREAD * fixed)


def careful_growth(running: float, device: str | None) -> float:
    """The growth of a batch to advise if step times do not show its effect: to twice as many
    requests, or to where reading the weights no longer takes most of a step on this device."""
    return max(2.0, even_batch(device, running) / max(running, 1.0))


def fixed_share(steps: Sequence[DecodeStep], running: float, device: str | None) -> FixedShare:
    """The share at this many running requests, from steps of other batch sizes.

    A step's time is T (s + d r / r0 + e p / p0) with s + d + e = 1 at the mean step: s is fixed, d
    grows with the running requests r, e with the prompt tokens p between two steps. Linear
    regression for s and e, with what the device lets expect as a prior (s = even / (even + r0);
    a prompt token costs what an output token adds to a step). Steps of one batch size only say how
    large e is, and s + e <= 1.
    """
    even = even_batch(device, running)
    spread = SPREAD if device in EVEN_BATCH else SPREAD_UNKNOWN
    expected = even / (even + running)
    if not steps:
        return FixedShare(running, expected, 0.0, 1.0)
    mean_s = statistics.fmean(step.seconds for step in steps)
    mean_r = statistics.fmean(step.running for step in steps)
    mean_p = statistics.fmean(step.prompt_tokens for step in steps)
    prompts_like = PROMPT_COST.get(device or "", 1.0) * mean_p
    grows = mean_r + prompts_like
    prior_s = even / (even + grows)
    prior_e = (1 - prior_s) * prompts_like / grows
    rows = []
    for step in steps:
        time, batch = step.seconds / mean_s, step.running / mean_r
        prompts = step.prompt_tokens / mean_p if mean_p else 0.0
        weight = 1 / max(time, 1.0) ** 2  # noise is proportional to the time
        rows.append((1 - batch, prompts - batch if mean_p else 0.0, time - batch, weight))
    noise = STEP_NOISE
    for _ in range(2):
        share, prompts, error, unsure = _posterior(rows, noise, (prior_s, prior_e), spread)
        squares = sum(w * (t - share * a - prompts * b) ** 2 for a, b, t, w in rows)
        residual = (squares / len(rows)) ** 0.5
        noise = max(noise, residual)
    share = min(max(share, 0.0), min(max(1 - prompts, 0.0), 1.0))
    most = min(max(1 - prompts + 2 * unsure, share), 1.0)
    low, high = max(share - 2 * error, 0.0), min(share + 2 * error, most)
    # From the mean step to that of ``running`` requests, whose prompts are in proportion.
    ratio = running / mean_r
    low, share, high = (each / (each + (1 - each) * ratio) for each in (low, share, high))
    scatter = min(2 * residual * (2 / len(rows)) ** 0.5, MOST_SCATTER)
    return FixedShare(running, share, low, high, len(steps), scatter)


def _posterior(
    rows: Sequence[tuple[float, float, float, float]],
    noise: float,
    prior: tuple[float, float],
    spread: float,
) -> tuple[float, float, float, float]:
    """Both coefficients of a Bayesian linear regression, and their standard deviations. prior,
    spread: their prior means and standard deviation. A row: two inputs, the output, its weight."""
    sure = 1 / spread**2
    aa = sum(w * a * a for a, _, _, w in rows) / noise**2 + sure
    ab = sum(w * a * b for a, b, _, w in rows) / noise**2
    bb = sum(w * b * b for _, b, _, w in rows) / noise**2 + sure
    at = sum(w * a * t for a, _, t, w in rows) / noise**2 + sure * prior[0]
    bt = sum(w * b * t for _, b, t, w in rows) / noise**2 + sure * prior[1]
    det = aa * bb - ab * ab
    first, second = (bb * at - ab * bt) / det, (aa * bt - ab * at) / det
    return first, second, (bb / det) ** 0.5, (aa / det) ** 0.5
