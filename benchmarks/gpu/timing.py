"""The device that is measured, and the times of what it does: of a GPU by its own events, with its
L2 cache emptied before each run; of a CPU, in a rehearsal, by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPEATS, REHEARSED = 20, 1
FLUSHED_BYTES = 256 << 20
"""More than the L2 cache of any GPU."""


def device() -> torch.device:
    """The GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds_of(call: Callable[[], object]) -> float:
    """Median seconds of what ``call`` launches, captured as a graph, so that the host's work is not
    in it."""
    if device().type == "cpu":
        return statistics.median(_clocked(call) for _ in range(REHEARSED))
    replay = captured(call)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device())
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for begin, end in events:
        flushed.zero_()
        begin.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """The replay of a graph of what ``call`` launches, after a first run that may compile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def host_seconds_of(call: Callable[[], object], times: int) -> float:
    """Mean seconds that the host takes for a call, while the device may still work."""
    call()
    synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    found = (time.perf_counter() - begin) / times
    synchronize()
    return found


def stall() -> None:
    """Keep the device busy for some 10 ms, so that what is launched next begins when all of it has
    been launched, and its time has nothing of the host's in it."""
    if device().type == "cuda":
        torch.cuda._sleep(20_000_000)


def synchronize() -> None:
    """Wait until the device has done everything."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def _clocked(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
