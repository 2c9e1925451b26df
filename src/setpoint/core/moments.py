"""Moments: what one scheduler did in a short time. The doctor and the console see a server as a
series of moments, whatever the source is: a log, ``/metrics``, a recording, or the engine's own
records.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T", int, float)


class Moment(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A stretch of time, usually a second or one log line. None: the source does not say. Means are
    over the batches of the moment; counts are sums over it."""

    at: float
    """When it begins, in seconds. The zero point is that of the source (``Source.clock``)."""
    seconds: float = 0.0
    """How long it lasts."""
    line: int = 0
    """Number of its first log line, from 1; 0 if the source has no lines."""
    text: str = ""
    """The text of that line, or a sentence with the same figures if the source has no lines."""

    num_prefill: int = 0
    """Prefill batches."""
    num_decode: int = 0
    """Decode observations: steps, or log lines, each of which stands for many steps."""

    running: float | None = None
    """Running requests (SGLang's #running-req)."""
    running_max: float | None = None
    queue: float | None = None
    """Waiting requests (#queue-req)."""
    queue_min: float | None = None
    queue_max: float | None = None
    preparing: float | None = None
    """Requests that wait for their grammar."""
    pending_tokens: float | None = None
    """Prompt tokens that wait to be computed (#pending-token)."""

    usage: float | None = None
    """Share of the KV pool in use, without what eviction can free (token usage), 0 to 1."""
    usage_max: float | None = None
    other_usage: dict[str, float] = {}
    """Usage of further pools by name (swa, mamba)."""
    tokens: float | None = None
    """Tokens in use (#token)."""
    pool: dict[str, int] = {}
    """Tokens of the pool by state (total, free, evictable, locked, held): while the last step ran,
    or, without steps, at the end."""

    gen_throughput: float | None = None
    """Generated tokens per second."""
    input_throughput: float | None = None
    """Prompt tokens per second."""
    new_seqs: int = 0
    new_tokens: int = 0
    """Prompt tokens that were computed."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache supplied."""
    largest_prefill: int = 0
    """Prompt tokens of the largest prefill batch."""
    output_tokens: int | None = None

    graph_hits: int = 0
    """Decode batches that ran as a captured graph."""
    graph_misses: int = 0
    """Decode batches that did not."""
    missed_running: float | None = None
    """Mean number of running requests in the batches that did not."""

    retractions: int = 0
    """How often the pool ran out of pages."""
    retracted: int = 0
    """Requests that went back to the queue because of that."""
    new_token_ratio: float | None = None
    refusals: dict[str, int] = {}
    """Why requests waited: ``core.records.AdmissionRefusal`` -> how often, counted once per request
    and step. Only Setpoint reports it."""
    ended: dict[str, int] = {}
    """Requests by how they ended: stop, length, abort, or an HTTP status."""

    model_s: float | None = None
    """Seconds in the executor (forward passes and sampling)."""
    busy_s: float | None = None
    """Seconds in turns of the loop, model_s included. For the rest of the moment the engine waited
    for requests."""
    cpu_s: float | None = None
    """Seconds of busy_s in which the engine had a CPU; other programs had it for the rest."""
    quantiles: dict[str, float] = {}
    """Latencies in seconds, by names as "ttft_p95", "itl_p50" or "wait_p50" (in the queue)."""
    other: dict[str, float] = {}
    """Fields of a log line that have no field here, by their name in the line."""


def has_steps(moment: Moment) -> bool:
    """Whether an engine computed in the moment. In one without steps no token comes."""
    return bool(moment.num_prefill or moment.num_decode)


def merge(moments: Sequence[Moment]) -> Moment:
    """Merge consecutive moments (at least one) into one. Line and text are those of the first."""
    first, last = moments[0], moments[-1]
    return Moment(
        at=first.at,
        seconds=max(last.at + last.seconds - first.at, sum(moment.seconds for moment in moments)),
        line=first.line,
        text=first.text,
        num_prefill=sum(moment.num_prefill for moment in moments),
        num_decode=sum(moment.num_decode for moment in moments),
        running=_mean(moments, lambda moment: moment.running),
        running_max=_most(moment.running_max for moment in moments),
        queue=_mean(moments, lambda moment: moment.queue),
        queue_min=_least(moment.queue_min for moment in moments),
        queue_max=_most(moment.queue_max for moment in moments),
        preparing=_mean(moments, lambda moment: moment.preparing),
        pending_tokens=_mean(moments, lambda moment: moment.pending_tokens),
        usage=_mean(moments, lambda moment: moment.usage),
        usage_max=_most(moment.usage_max for moment in moments),
        other_usage=_max_by_name(moment.other_usage for moment in moments),
        tokens=_mean(moments, lambda moment: moment.tokens),
        pool=last.pool,
        gen_throughput=_mean(moments, lambda moment: moment.gen_throughput),
        input_throughput=_mean(moments, lambda moment: moment.input_throughput),
        new_seqs=sum(moment.new_seqs for moment in moments),
        new_tokens=sum(moment.new_tokens for moment in moments),
        cached_tokens=sum(moment.cached_tokens for moment in moments),
        largest_prefill=max(moment.largest_prefill for moment in moments),
        output_tokens=_sum(moment.output_tokens for moment in moments),
        graph_hits=sum(moment.graph_hits for moment in moments),
        graph_misses=sum(moment.graph_misses for moment in moments),
        missed_running=_mean(moments, lambda moment: moment.missed_running),
        retractions=sum(moment.retractions for moment in moments),
        retracted=sum(moment.retracted for moment in moments),
        new_token_ratio=_mean(moments, lambda moment: moment.new_token_ratio),
        refusals=_sum_by_name(moment.refusals for moment in moments),
        ended=_sum_by_name(moment.ended for moment in moments),
        model_s=_sum(moment.model_s for moment in moments),
        busy_s=_sum(moment.busy_s for moment in moments),
        cpu_s=_sum(moment.cpu_s for moment in moments),
        quantiles=_max_by_name(moment.quantiles for moment in moments),
        other=_max_by_name(moment.other for moment in moments),
    )


def add_up(engines: Iterable[Sequence[Moment]], second: int) -> Moment | None:
    """What several engines, each given by its moments in the order of time, did in one second since
    1970; None if none of them has a moment in it. Figures that count something are sums, shares of
    an engine's pool or time are means. A moment counts in the second in which it begins; in those
    that it lasts through, only its state does."""
    found = [part for moments in engines if (part := _part(moments, second)) is not None]
    if not found:
        return None
    total = merge(found)
    total.at, total.seconds, total.line, total.text = float(second), 1.0, 0, ""
    for name in _ADDED:
        setattr(total, name, _sum(getattr(part, name) for part in found))
    for name in _AVERAGED:
        known = [value for part in found if (value := getattr(part, name)) is not None]
        setattr(total, name, sum(known) / len(known) if known else None)
    total.pool = _sum_by_name(part.pool for part in found)
    return total


_STATE = (
    *("running", "running_max", "queue", "queue_min", "queue_max", "preparing", "pending_tokens"),
    *("usage", "usage_max", "other_usage", "tokens", "pool", "gen_throughput", "input_throughput"),
    "new_token_ratio",
)
"""Fields that hold all through a moment."""
_ADDED = (
    *("running", "running_max", "queue", "queue_min", "queue_max", "preparing", "pending_tokens"),
    *("tokens", "gen_throughput", "input_throughput"),
)
_AVERAGED = ("usage", "new_token_ratio", "model_s", "busy_s", "cpu_s")


def _part(moments: Sequence[Moment], second: int) -> Moment | None:
    """An engine's part in a second."""
    first = bisect_left(moments, float(second), key=lambda moment: moment.at)
    after = bisect_left(moments, second + 1.0, key=lambda moment: moment.at)
    if first < after:
        return merge([moments[index] for index in range(first, after)])
    if first and moments[first - 1].at + moments[first - 1].seconds > second:
        lasting = moments[first - 1]
        return Moment(at=float(second), **{name: getattr(lasting, name) for name in _STATE})
    return None


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the values, given in ascending order, that at least ``share`` of them (0 to
    1) do not exceed."""
    return ordered[min(math.ceil(share * len(ordered)) or 1, len(ordered)) - 1]


def _mean(moments: Sequence[Moment], value: Callable[[Moment], float | None]) -> float | None:
    """The mean, weighted by the batches of each moment, because means are over batches."""
    total = weight = 0.0
    for moment in moments:
        found = value(moment)
        if found is not None:
            batches = max(moment.num_decode + moment.num_prefill, 1)
            total += found * batches
            weight += batches
    return total / weight if weight else None


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _sum(values: Iterable[T | None]) -> T | None:
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None


def _sum_by_name(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return total


def _max_by_name(values: Iterable[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in values:
        for name, value in each.items():
            found[name] = max(found.get(name, value), value)
    return found
