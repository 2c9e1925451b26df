"""Computes values of options and predicted effects from observations: pure arithmetic. Shares are 0
to 1, memory is in GB, times are in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

INIT_RATIO = 0.7
"""SGLang's SGLANG_INIT_NEW_TOKEN_RATIO: the share of the remaining output limits that is reserved
at a conservativeness of 1."""
MAX_CONSERVATIVENESS = 1.43
"""1 / INIT_RATIO: the ratio is at most 1, so that larger values change nothing."""
MIN_CONSERVATIVENESS = 0.1
GOOD_USAGE = 0.93
"""Usage to aim at: the guides call more than 0.9 good, and 1 means retractions."""
HEADROOM_GB = 8.0
"""Free memory when the server is ready, above which the guides give the rest to the pool."""
ACTIVATION_MB_PER_TOKEN = 1.5
"""Memory of activations for each prompt token of a batch, as SGLang's own estimate of
--mem-fraction-static has it."""
PREFILL_KEPT_GB = 3.0
"""Memory of an 80 GB device that stays free beside the activations of larger prefill batches."""


def conservativeness_for(
    present: float, usage: float, running: float, queue: float
) -> tuple[float, float]:
    """The --schedule-conservativeness that admits the queue, and the growth of the batch with it.

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
    wanted = max(wanted, 1.15 * present, MIN_CONSERVATIVENESS)
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
    """The value rounded as people type it: to a multiple of 8 from 32 on, of 64 from 512 on."""
    step = 1 if value < 32 else 8 if value < 512 else 64
    return max(int(value // step * step), 1)


def queue_limit(running: float) -> int:
    """The --max-queued-requests at which a request waits about twice as long as it is served
    (Little's law), within what the guides call a healthy queue."""
    return rounded(min(max(2 * running, 100.0), 2000.0))


def mem_fraction_for(
    present: float | None, available_gb: float | None, total_gb: float | None
) -> float | None:
    """The --mem-fraction-static that leaves 6.5 GB, the middle of the guides' 5 to 8: each GB of
    the rest is 1 / total of the fraction. None if no memory is to spare, or too little is known."""
    if available_gb is None or available_gb <= HEADROOM_GB or not total_gb or present is None:
        return None
    value = present + (available_gb - 6.5) / total_gb
    return round(min(value, 0.97), 3) if value > present else None


def prefill_size_for(
    present: float,
    waiting_tokens: float | None,
    free_gb: float | None,
    kept_gb: float = PREFILL_KEPT_GB,
) -> int | None:
    """The size of prefill batches that takes the waiting prompts in fewer steps: twice to four
    times today's, as far as the memory that is free when the server is ready holds their
    activations and ``kept_gb`` remain; a multiple of 256. None if no more than ``kept_gb`` are
    free."""
    if free_gb is not None and free_gb <= kept_gb:
        return None
    factor = 2.0
    if waiting_tokens is not None and waiting_tokens > 8 * present:
        factor = 4.0
    size = min(present * factor, max(32768.0, 2 * present))
    if free_gb is not None:
        room = (free_gb - kept_gb) * 1024 / ACTIVATION_MB_PER_TOKEN
        size = min(size, present + room)
    step = 256 if present >= 256 else 1
    return max(int(size // step * step), int(present) + step)
