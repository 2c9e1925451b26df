"""Sends prompts at their times, a limited number at once, and measures the CPU time that this costs
this process.

Works on any coroutine that answers one prompt. It knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext

import numpy as np

from setpoint.bench.request_record import Prompt, RequestRecord
from setpoint.bench.run_metrics import Run

Send = Callable[[Prompt], Awaitable[RequestRecord]]


def arrival_times(num_requests: int, rate: float, *, seed: int) -> list[float]:
    """Seconds from the start at which prompts are sent: a Poisson process that begins with a
    request at 0; all 0 for an infinite rate."""
    if math.isinf(rate):
        return [0.0] * num_requests
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=num_requests - 1)
    times: list[float] = np.concatenate([[0.0], np.cumsum(gaps)]).tolist()
    return times


async def drive(
    send: Send,
    prompts: Sequence[Prompt],
    arrivals_s: Sequence[float],
    *,
    limit: int | None,
    on_done: Callable[[RequestRecord], None],
) -> Run:
    """Send all prompts; returns the Run, with the records in the order of the prompts. ``on_done``
    gets every record as it ends."""
    gate = nullcontext() if limit is None else asyncio.Semaphore(limit)

    async def one(prompt: Prompt) -> RequestRecord:
        async with gate:
            record = await send(prompt)
        on_done(record)
        return record

    tasks = []
    began, cpu = time.perf_counter(), time.process_time()
    for prompt, at in zip(prompts, arrivals_s, strict=True):
        wait_s = began + at - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(one(prompt)))
    records = await asyncio.gather(*tasks)
    return Run(records, began, time.perf_counter(), time.process_time() - cpu)
