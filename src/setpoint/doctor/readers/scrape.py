"""Reads one scrape of ``/metrics`` of SGLang or Setpoint in any version: names may begin with
``sglang:`` or ``sglang_``, with and without ``_total`` at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

from setpoint.core.errors import SourceError
from setpoint.doctor.plausible import is_possible

Labels = Mapping[str, str]
Engine = Literal["setpoint", "sglang"]
REQUEST = None
"""The rank of series that the frontend counts for all ranks."""


@dataclass(slots=True)
class Values:
    """The series of one rank."""

    samples: dict[str, list[tuple[Labels, float]]] = field(default_factory=dict)
    """Name without its beginning and without "_total" -> its samples."""

    def one(self, *names: str) -> float | None:
        """The sum of the samples of the first of these names that there is."""
        for name in names:
            if name in self.samples:
                return sum(value for _, value in self.samples[name])
        return None

    def where(self, name: str, label: str, beginning: str) -> float | None:
        """The sum of the samples whose label has a value with this beginning; None without such a
        series."""
        if name not in self.samples:
            return None
        return sum(
            value
            for labels, value in self.samples[name]
            if labels.get(label, "").startswith(beginning)
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Values by a label, summed over the others."""
        found: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            if label in labels:
                found[labels[label]] = found.get(labels[label], 0.0) + value
        return found


@dataclass(slots=True)
class Scrape:
    at: float
    """Seconds since 1970, or any other count of them."""
    engine: Engine
    model: str | None
    ranks: dict[str, Values]
    """The series of each data-parallel rank, by its name; "" if there is only one."""
    requests: Values
    """The series of the frontend."""
    impossible: list[str] = field(default_factory=list)
    """Samples that were left out because their value is impossible: "token_usage=nan"."""


def read_scrape(page: str, *, at: float, name: str) -> Scrape:
    """Read a page. Raises SourceError if it is not in Prometheus' format or has no series of an
    engine. name: the source, for that message."""
    try:
        families = list(text_string_to_metric_families(page))
    except Exception as error:  # the parser raises whatever its parts do
        raise SourceError(
            f"{name} is not a page of metrics: {str(error)[:100] or type(error).__name__}."
        ) from None
    samples = [
        (short, sample.labels, float(sample.value), engine)
        for family in families
        for sample in family.samples
        for short, engine in [_short(sample.name)]
        if short
    ]
    if not samples:
        raise SourceError(
            f"{name} has no series of SGLang or Setpoint (sglang:…); is it another server's page?"
        )
    ranks: dict[str, Values] = {}
    requests = Values()
    impossible = []
    for short, labels, value, _ in samples:
        if not _is_first(labels):
            continue
        if not _is_possible(short, value):
            impossible.append(f"{short}={value:g}")
            continue
        values = requests
        if "tp_rank" in labels or "dp_rank" in labels or short in _OF_RANKS:
            values = ranks.setdefault(_rank(labels), Values())
        values.samples.setdefault(short, []).append((labels, value))
    models = (labels["model_name"] for _, labels, _, _ in samples if "model_name" in labels)
    engine: Engine = "setpoint" if any(each[3] == "setpoint" for each in samples) else "sglang"
    return Scrape(at, engine, next(models, None), ranks, requests, impossible)


_SHARES = frozenset({"token_usage", "full_token_usage", "swa_token_usage", "mamba_usage"})
_AMOUNTS = frozenset(
    {
        *("num_running_reqs", "num_queue_reqs", "num_grammar_queue_reqs", "num_used_tokens"),
        *("kv_used_tokens", "kv_available_tokens", "kv_evictable_tokens", "max_total_num_tokens"),
        *("gen_throughput", "new_token_ratio", "num_retracted_reqs", "context_len"),
    }
)


def _is_possible(short: str, value: float) -> bool:
    """Whether a series can have this value. A counter, which grows for ever, can have any
    number."""
    if short in _SHARES or short in _AMOUNTS:
        return is_possible(value, is_share=short in _SHARES)
    return math.isfinite(value)


_OF_RANKS = frozenset(
    {
        *("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage"),
        *("gen_throughput", "cache_hit_rate", "num_grammar_queue_reqs"),
    }
)
"""Series of schedulers that have no label for their rank in old versions."""


def pages_in(text: str) -> list[str]:
    """The pages in a file, one after the other: a new page begins where the first name occurs
    again."""
    marker = next((line for line in text.splitlines() if line.startswith("# HELP ")), None)
    if marker is None:
        return [text]
    parts = text.split(marker)
    return [marker + part for part in parts[1:]]


def _short(name: str) -> tuple[str, str]:
    """The name without the parts in which versions differ, and the engine whose series it is; ""
    for another program."""
    for beginning, engine in _BEGINNINGS:
        if name.startswith(beginning):
            return name.removeprefix(beginning).removesuffix("_total"), engine
    return "", ""


_BEGINNINGS = (
    *(("sglang:", "sglang"), ("sglang_", "sglang")),
    *(("setpoint:", "setpoint"), ("setpoint_", "setpoint")),
)


def _is_first(labels: Labels) -> bool:
    """Whether the sample is from the first scheduler of its group, which reports for all."""
    return all(labels.get(name, "0") in ("0", "") for name in ("tp_rank", "pp_rank"))


def _rank(labels: Labels) -> str:
    rank = labels.get("dp_rank", "")
    return f"DP{rank}" if rank and rank != "None" else ""


def quantiles(before: Values, after: Values, names: Iterable[str], short: str) -> dict[str, float]:
    """p50, p95 and p99 of what a histogram counted between two scrapes, linear within a bucket.
    names: possible names of the histogram, of which the first existing one is used."""
    for name in names:
        later = after.by(f"{name}_bucket", "le")
        if later:
            break
    else:
        return {}
    earlier = before.by(f"{name}_bucket", "le")
    bounds = sorted(
        (float(bound), count - earlier.get(bound, 0.0)) for bound, count in later.items()
    )
    total = bounds[-1][1] if bounds else 0.0
    if total <= 0:
        return {}
    return {f"{short}_p{share}": _within(bounds, share / 100 * total) for share in (50, 95, 99)}


def _within(bounds: list[tuple[float, float]], wanted: float) -> float:
    """The value up to which this many values were counted. Values above the last bound count as
    that bound."""
    low, before = 0.0, 0.0
    for bound, count in bounds:
        if count >= wanted:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (wanted - before) / max(count - before, 1e-9)
        low, before = bound, count
    return low
