"""From observations to values of options and to predicted effects: pure arithmetic. Shares are 0 to
1, memory is in GB, times in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

INIT_RATIO = 0.7
"""SGLang's SGLANG_INIT_NEW_TOKEN_RATIO: share of the outputs still allowed that is reserved at a
conservativeness of 1."""
MAX_CONSERVATIVENESS = 1.43
"""1 / INIT_RATIO: the ratio is at most 1, so that larger values change nothing."""
MIN_CONSERVATIVENESS = 0.1
GOOD_USAGE = 0.93
"""Usage to aim at: the guides call more than 0.9 good, and 1 means retractions."""
ACTIVATION_MB_PER_TOKEN = 1.5
"""Memory of activations for each prompt token of a batch, as SGLang's own estimate of
--mem-fraction-static has it."""


def conservativeness_for(
    present: float, usage: float, running: float, queue: float
) -> tuple[float, float]:
    """The --schedule-conservativeness that lets the queue in, and the growth of the batch by then.

    Admission stops where usage and the reserve fill the pool: the reserve is the rest, 1 - usage.
    It is proportional to the running requests and to the conservativeness c (reserve =
    sum(min(max_new - generated, 4096)) x ratio, with a ratio between 0.7 c and 0.098 c). A batch
    that is f times as large needs f x usage and a reserve of 1 - f x usage, so that
    c' = c (1 - f x usage) / (f (1 - usage)).
    """
    growth = GOOD_USAGE / max(usage, 0.01)
    if running > 0:
        growth = min(growth, (running + max(queue, 1.0)) / running)
    growth = max(growth, 1.0)
    value = present * (1 - growth * usage) / (growth * max(1 - usage, 0.01))
    value = min(max(value, MIN_CONSERVATIVENESS), max(0.9 * present, MIN_CONSERVATIVENESS))
    return round(value, 2), growth


def conservativeness_against_retractions(present: float, ratios_after: Sequence[float]) -> float:
    """The --schedule-conservativeness whose initial ratio is the one that running requests turned
    out to need: after a retraction the scheduler sets the ratio to (generated + 20 n) / allowed,
    and ratio = 0.7 c. Without such ratios, the guides' 1.3."""
    wanted = statistics.median(ratios_after) / INIT_RATIO if ratios_after else 1.3
    wanted = max(wanted, 1.15 * present)
    return round(min(wanted, MAX_CONSERVATIVENESS), 2)


def running_for(slots: float, usage: float, pool: float | None, per_request: float | None) -> int:
    """The --max-running-requests with which the pool would be in good use, at today's tokens per
    request: slots x 0.9 / usage, and no more than the pool holds."""
    wanted = slots * 0.9 / max(usage, 0.01)
    if pool and per_request:
        wanted = min(wanted, pool / per_request)
    wanted = max(min(wanted, 4096.0), slots + 1)
    return rounded(wanted)


def rounded(value: float) -> int:
    """To a multiple that people type: of 8 from 32 on, of 64 from 512 on."""
    step = 1 if value < 32 else 8 if value < 512 else 64
    return max(int(value // step * step), 1)


@dataclass(slots=True, frozen=True)
class StepTime:
    """Time of a decode step as a + b x running: a is what every step costs (reading the weights),
    b what each request adds."""

    base: float
    per_request: float
    num_points: int

    def throughput(self, running: float) -> float:
        return running / (self.base + self.per_request * running)

    def gain(self, running: float, growth: float) -> float:
        """Factor of the throughput if ``growth`` times as many requests run."""
        return self.throughput(running * growth) / self.throughput(running)


def fit_step_time(points: Iterable[tuple[float, float]]) -> StepTime | None:
    """Least squares over (running, seconds of a step). None unless batch sizes differ by a third
    and there are six points; a negative coefficient counts as 0."""
    kept = [(x, y) for x, y in points if x > 0 and y > 0]
    if len(kept) < 6:
        return None
    xs, ys = [x for x, _ in kept], [y for _, y in kept]
    if max(xs) < 1.33 * min(xs):
        return None
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in kept) / spread
    slope = min(max(slope, 0.0), mean_y / mean_x)
    base = max(mean_y - slope * mean_x, 0.0)
    return StepTime(base, slope, len(kept))


def activation_gb(tokens: float) -> float:
    return tokens * ACTIVATION_MB_PER_TOKEN / 1024
