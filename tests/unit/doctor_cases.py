"""Observations built by hand, for the tests of the doctor's checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from setpoint.core.moments import Moment
from setpoint.doctor.observations import Event, Facts, Observations, Rank, Source

GAP = 2.0
"""Seconds between two lines."""


def decode(running: float, queue: float, usage: float, **fields: Any) -> Moment:
    """A line about 40 decode steps."""
    values: dict[str, Any] = {"tokens": usage * 100_000, "gen_throughput": 20.0 * running}
    values |= fields
    text = f"Decode batch, #running-req: {running}, token usage: {usage}, #queue-req: {queue}"
    return Moment(
        at=0.0, num_decode=1, running=running, queue=queue, usage=usage, text=text, **values
    )


def prefill(
    new_seqs: int, new_tokens: int, queue: float, running: float, usage: float, **fields: Any
) -> Moment:
    """A line about a prefill batch."""
    text = f"Prefill batch, #new-seq: {new_seqs}, #new-token: {new_tokens}, #queue-req: {queue}"
    return Moment(
        at=0.0,
        num_prefill=1,
        new_seqs=new_seqs,
        new_tokens=new_tokens,
        largest_prefill=new_tokens,
        running=running,
        queue=queue,
        usage=usage,
        text=text,
        **fields,
    )


def rank(moments: Sequence[Moment], name: str = "", gap: float = GAP, start: float = 0.0) -> Rank:
    """These lines, ``gap`` seconds apart, with their numbers."""
    for index, moment in enumerate(moments):
        moment.at = start + gap * index
        moment.line = index + 1
    return Rank(name, moments=list(moments))


def seen(*ranks: Rank, clock: Any = "timestamps", **facts: Any) -> Observations:
    lines = sum(len(each.moments) for each in ranks)
    source = Source("server.log", "log", clock=clock, num_batch_lines=lines, num_understood=lines)
    return Observations([source], Facts(**facts), list(ranks))


def retract(rank: Rank, times: int, ratio_after: float = 0.9) -> Rank:
    """The same rank with retractions spread over its time."""
    step = max(len(rank.moments) // times, 1)
    for index in range(times):
        at = rank.moments[min(index * step, len(rank.moments) - 1)].at
        values: dict[str, float | str] = {"num": 1, "ratio_before": 0.3, "ratio_after": ratio_after}
        text = f"KV cache pool is full. Retract requests. #new_token_ratio: 0.3 -> {ratio_after}"
        rank.events.append(Event("retraction", at, 1000 + index, text, values))
    rank.num_events["retraction"] = times
    return rank
