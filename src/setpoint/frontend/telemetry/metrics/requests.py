"""Counts and distributions of clients' requests, measured where their answers are made: what a
client sees, not what the engine does. Kept by the frontend, so they outlive every engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from setpoint.core.jsonfile import parse_json
from setpoint.core.request import Request
from setpoint.frontend.telemetry.measured_sequence import MeasuredSequence
from setpoint.observe.catalogue import REQUEST_COUNTERS, REQUEST_HISTOGRAMS
from setpoint.observe.series import Histogram, Kind, Series

MAX_LABEL_SETS = 200
"""Most different values of custom labels that are distinguished; further ones count as OTHER.
Clients choose them, and each set takes memory here and in Prometheus."""
OTHER = "other"
MAX_LABEL_CHARS = 128

OWN_VALUES = {"is_streaming": ("false", "true"), "cache_source": ("device", "host", "storage")}
"""The values of the series' own labels."""

Samples = dict[str, dict[tuple[str, ...], Any]]
"""Name of a series -> values of its own labels -> a number, or a Histogram."""


class SequenceMeter:
    """Takes the times of one sequence's tokens. Looks nothing up for a token."""

    __slots__ = (
        "_arrived_at",
        "_between",
        "_first",
        "_first_at",
        "_is_streaming",
        "_last_at",
        "_open_keys",
        "_request",
        "_samples",
    )

    def __init__(
        self, metrics: RequestMetrics, samples: Samples, request: Request, arrived_at: float
    ) -> None:
        metrics.open_keys[request.options.routing_key] += 1
        self._open_keys, self._request = metrics.open_keys, request
        self._samples = samples
        self._arrived_at = arrived_at
        self._is_streaming = ("true",) if request.options.stream else ("false",)
        self._first: Histogram = samples["sglang:time_to_first_token_seconds"][self._is_streaming]
        self._between: Histogram = samples["sglang:inter_token_latency_seconds"][()]
        self._first_at = self._last_at = 0.0
        """Seconds of the clock of ``arrived_at``; 0 before the first token."""

    def tokens(self, count: int, now: float) -> None:
        """``count`` tokens, at least one, arrived together."""
        if self._last_at:
            self._between.observe((now - self._last_at) / count, count)
        else:
            self._first_at = now
            self._first.observe(now - self._arrived_at)
        self._last_at = now

    def ended(self, sequence: MeasuredSequence) -> None:
        samples, streaming = self._samples, self._is_streaming
        key = self._request.options.routing_key
        self._open_keys[key] -= 1
        if not self._open_keys[key]:
            del self._open_keys[key]
        samples["sglang:num_requests"][streaming] += 1
        samples["sglang:prompt_tokens"][streaming] += sequence.num_prompt
        samples["sglang:generation_tokens"][streaming] += sequence.num_outputs
        from_host, loaded = sequence.num_from_host, sequence.num_loaded
        by_source = samples["sglang:cached_tokens"]
        by_source["device",] += sequence.num_cached - loaded
        if loaded:
            by_source["host",] += from_host
            by_source["storage",] += loaded - from_host
        if self._request.sampling.constraint is not None:
            samples["sglang:num_so_requests"][()] += 1
        if not sequence.is_complete:
            samples["sglang:num_aborted_requests"][()] += 1
            return
        ended_at = sequence.finished_at or time.perf_counter()
        whole_s = ended_at - self._arrived_at
        samples["sglang:e2e_request_latency_seconds"][streaming].observe(whole_s)
        samples["sglang:prompt_tokens_histogram"][()].observe(sequence.num_prompt)
        uncached = sequence.num_prompt - sequence.num_cached
        samples["sglang:uncached_prompt_tokens_histogram"][()].observe(uncached)
        samples["sglang:generation_tokens_histogram"][()].observe(sequence.num_outputs)
        if sequence.num_outputs > 1:
            each_s = (ended_at - self._first_at) / (sequence.num_outputs - 1)
            samples["sglang:request_time_per_output_token_seconds"][()].observe(each_s)


class RequestMetrics:
    """The request series, by custom labels."""

    def __init__(
        self,
        *,
        buckets: Mapping[str, Sequence[float]] | None = None,
        label_names: Sequence[str] = (),
        labels_header: str = "x-custom-labels",
    ) -> None:
        """buckets: name of a histogram -> its upper bounds, where they are not the declared ones.
        label_names: the custom labels that a request may have, in a JSON object in its header
        ``labels_header``."""
        self._buckets = buckets or {}
        self.label_names = tuple(label_names)
        self._labels_header = labels_header.lower()
        self.by_labels: dict[tuple[str, ...], Samples] = {}
        """Values of the custom labels -> what was counted under them."""
        self.open_keys: Counter[str] = Counter()
        """Routing key -> its open sequences; "" for those without."""
        self._of(("",) * len(self.label_names))

    def labels_in(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """The custom labels that a request's headers give it: none if they are not a JSON
        object."""
        given = headers.get(self._labels_header) if self.label_names else None
        if given is None:
            return {}
        try:
            found = parse_json(given)
        except ValueError:
            return {}
        if not isinstance(found, dict):
            return {}
        # JSON can hold halves of characters, which no page can.
        return {key: str(value).encode("utf-8", "replace").decode() for key, value in found.items()}

    def meter(
        self, request: Request, arrived_at: float, labels: Mapping[str, str]
    ) -> SequenceMeter:
        """The meter of a sequence whose request arrived then. labels: values of custom labels; one
        that is missing is "", one that is not among ``label_names`` is ignored."""
        values = (labels.get(name, "")[:MAX_LABEL_CHARS] for name in self.label_names)
        return SequenceMeter(self, self._of(tuple(values)), request, arrived_at)

    def _of(self, values: tuple[str, ...]) -> Samples:
        found = self.by_labels.get(values)
        if found is None:
            if len(self.by_labels) >= MAX_LABEL_SETS:
                values = (OTHER,) * len(self.label_names)
            found = self.by_labels.setdefault(values, self._new())
        return found

    def _new(self) -> Samples:
        return {
            series.name: {
                own: self._zero(series)
                for own in product(*(OWN_VALUES[label] for label in series.labels))
            }
            for series in (*REQUEST_COUNTERS, *REQUEST_HISTOGRAMS)
        }

    def _zero(self, series: Series) -> int | Histogram:
        if series.kind is Kind.COUNTER:
            return 0
        return Histogram(self._buckets.get(series.name, series.buckets))
