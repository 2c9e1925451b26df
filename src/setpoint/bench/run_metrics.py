"""Computes the figures of a run from its records. Pure arithmetic: times come in seconds and go out
in milliseconds, as in SGLang's results.

Definitions. TTFT: request sent to first token. TPOT: (E2E - TTFT) / (tokens - 1). ITL: the gaps
between chunks; a chunk of k tokens counts as k gaps of a k-th each. Peak output throughput: the
most tokens in one second of the run, with seconds counted from its start. Peak concurrency: the
most requests in flight at one time. Steady state: from the first to the last moment with at least
STEADY_SHARE of the concurrency that the run had half of its time; it leaves out the filling at the
beginning and the emptying at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from setpoint.bench.request_record import RequestRecord
from setpoint.core.errors import ConfigError

STEADY_SHARE = 0.9
PERCENTILES = (90, 95, 99)
SERIES = ("e2e_latency", "ttft", "tpot", "itl")


@dataclass(slots=True, frozen=True)
class Run:
    """Everything that was observed in a run."""

    records: Sequence[RequestRecord]
    started_at: float
    ended_at: float
    cpu_s: float
    """CPU seconds that this process spent meanwhile."""

    @property
    def duration_s(self) -> float:
        return self.ended_at - self.started_at

    @property
    def good(self) -> list[RequestRecord]:
        return [record for record in self.records if not record.error]


def num_outputs(record: RequestRecord) -> int:
    """Number of tokens of an answer: the server's count, or one per chunk if it gives none."""
    return sum(record.counts) if record.num_outputs is None else record.num_outputs


def num_prompt(record: RequestRecord) -> int:
    return record.prompt.num_tokens if record.num_prompt is None else record.num_prompt


def e2e_s(record: RequestRecord) -> float:
    return record.ended_at - record.started_at


def ttft_s(record: RequestRecord) -> float:
    return record.times[0] - record.started_at if record.times else 0.0


def tpot_s(record: RequestRecord) -> float | None:
    """None for an answer of one token or one chunk."""
    return (
        (e2e_s(record) - ttft_s(record)) / max(num_outputs(record) - 1, 1)
        if len(record.times) > 1
        else None
    )


def itls_s(record: RequestRecord) -> list[float]:
    pairs = zip(record.times, record.times[1:], record.counts[1:], strict=False)
    return [gap for before, now, count in pairs for gap in [(now - before) / count] * count]


def summary(run: Run) -> dict[str, Any]:
    """The figures of SGLang's result, with its names and in its order."""
    good, duration = run.good, run.duration_s
    inputs, outputs = sum(map(num_prompt, good)), sum(map(num_outputs, good))
    second, level = tokens_per_second(run), concurrency(run)
    series = {
        "e2e_latency": [e2e_s(record) for record in good],
        "ttft": [ttft_s(record) for record in good if record.times],
        "tpot": [tpot for record in good if (tpot := tpot_s(record)) is not None],
        "itl": [itl for record in good for itl in itls_s(record)],
    }
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        **totals(len(good), inputs, outputs, duration),
    }
    for name in SERIES:
        figures |= _spread(name, series[name])
    return {
        **figures,
        "max_itl_ms": max(series["itl"], default=0.0) * 1e3,
        "concurrency": sum(series["e2e_latency"]) / duration,
        "max_output_tokens_per_s": max(second, default=0.0),
        "max_concurrent_requests": max((count for _, count in level), default=0),
    }


def totals(
    num_requests: int, num_inputs: int, num_outputs: int, duration_s: float
) -> dict[str, Any]:
    """SGLang's keys for the requests answered in ``duration_s`` seconds: tokens, and all rates per
    second."""
    return {
        "total_input_tokens": num_inputs,
        "total_output_tokens": num_outputs,
        "request_throughput": num_requests / duration_s,
        "input_throughput": num_inputs / duration_s,
        "output_throughput": num_outputs / duration_s,
        "total_throughput": (num_inputs + num_outputs) / duration_s,
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles; 0 if there are no values, as in SGLang."""
    found = np.array(values or [0.0]) * 1e3
    spread = {"mean": found.mean(), "median": np.median(found), "std": found.std()}
    spread |= {f"p{percent}": np.percentile(found, percent) for percent in PERCENTILES}
    return {f"{which}_{name}_ms": float(value) for which, value in spread.items()}


def failures(run: Run) -> dict[str, int]:
    """Reason -> number of failures, most frequent first."""
    return dict(Counter(record.error for record in run.records if record.error).most_common())


def cache_report(run: Run) -> dict[str, Any]:
    prompt = sum(map(num_prompt, run.good))
    places = {
        place: sum(record.cached.get(place, 0) for record in run.good)
        for place in ("device", "host", "storage")
    }
    cached = sum(places.values())
    return {
        "total_prompt_tokens": prompt,
        "total_cached_tokens": cached,
        "cache_hit_rate_pct": 100 * cached / prompt if prompt else 0.0,
        **{f"{place}_cached_tokens": count for place, count in places.items()},
    }


def concurrency(run: Run) -> list[tuple[float, int]]:
    """(seconds from the start, requests in flight from then on) for the successful requests."""
    changes = sorted(
        [(record.started_at, 1) for record in run.good]
        + [(record.ended_at, -1) for record in run.good]
    )
    levels, level = [], 0
    for at, change in changes:
        level += change
        levels.append((at - run.started_at, level))
    return levels


def token_times(run: Run) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """When tokens arrived, in seconds from the start, and how many. If only an answer's total is
    known, it is spread over its chunks."""
    times = [at - run.started_at for record in run.good for at in record.times]
    weights = [
        count * num_outputs(record) / sum(record.counts)
        for record in run.good
        for count in record.counts
    ]
    return np.array(times), np.array(weights)


def tokens_per_second(run: Run) -> list[float]:
    """Number of tokens in each second of the run."""
    times, weights = token_times(run)
    return np.bincount(times.astype(int), weights=weights).tolist() if len(times) else []


def concurrency_per_second(run: Run) -> list[float]:
    """Mean number of requests in flight in each second of the run."""
    means = [0.0] * int(np.ceil(run.duration_s))
    for (begin, level), (end, _) in pairwise(concurrency(run)):
        while begin < end:
            second = int(begin)
            until = min(end, second + 1.0)
            means[second] += level * (until - begin)
            begin = until
    return means


def steady_state(run: Run) -> dict[str, float] | None:
    """The figures of the steady state, which the module's docstring defines; None if nothing was
    answered."""
    levels = concurrency(run)
    if not levels:
        return None
    spans = [(at, after - at, level) for (at, level), (after, _) in pairwise(levels) if after > at]
    half, spent, usual = sum(length for _, length, _ in spans) / 2, 0.0, 0
    for _, length, level in sorted(spans, key=lambda span: -span[2]):
        spent, usual = spent + length, level
        if spent >= half:
            break
    within = [(at, at + length) for at, length, level in spans if level >= STEADY_SHARE * usual]
    begin, end = within[0][0], within[-1][1]
    times, weights = token_times(run)
    tokens = float(weights[(times > begin) & (times <= end)].sum()) if len(times) else 0.0
    num_ended = sum(begin < record.ended_at - run.started_at <= end for record in run.good)
    return {
        "steady_begin": begin,
        "steady_duration": end - begin,
        "steady_concurrency": (
            sum(length * level for at, length, level in spans if begin <= at < end) / (end - begin)
        ),
        "steady_output_throughput": tokens / (end - begin),
        "steady_request_throughput": num_ended / (end - begin),
    }


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Parse ``ttft:200 e2el:3000`` to milliseconds by name. Raises ConfigError."""
    limits = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            limits[name] = float(limit)
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or limits[name] <= 0:
            raise ConfigError(
                f"--goodput takes ttft:MS, tpot:MS and e2el:MS with positive numbers; got {word!r}."
            )
    return limits


def goodput(run: Run, limits_ms: Mapping[str, float]) -> float:
    """Requests per second that keep every limit. An answer of one token keeps any limit of TPOT."""

    def keeps(record: RequestRecord) -> bool:
        found_s = {"ttft": ttft_s(record), "tpot": tpot_s(record) or 0.0, "e2el": e2e_s(record)}
        return all(found_s[name] * 1e3 <= limit for name, limit in limits_ms.items())

    return sum(map(keeps, run.good)) / run.duration_s
