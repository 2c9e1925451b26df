"""Histograms, and what the readers of the scheduler's stream make of it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from setpoint.core.messages import ToFrontend, TokenEvent, Tokens
from setpoint.core.records import GrammarLate, PreparationEnded, RequestDone, Turn
from setpoint.observe.catalogue import BY_NAME, SERIES
from setpoint.observe.engine_metrics import IDLE_S, EngineMetrics
from setpoint.observe.figures import Figures
from setpoint.observe.metrics_page import PATH, page
from setpoint.observe.series import COMMON_LABELS, Histogram, Kind, Scope
from setpoint.observe.tee import Tee
from setpoint_testing.harness import Harness, Wire

BOUNDS = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=30, unique=True).map(
    sorted
)


@given(BOUNDS, st.lists(st.tuples(st.floats(0, 2e6), st.integers(1, 5)), max_size=50))
def test_every_value_is_in_the_bucket_of_the_first_bound_that_is_not_smaller(
    bounds: list[float], values: list[tuple[float, int]]
) -> None:
    histogram = Histogram(bounds)
    expected: Counter[int] = Counter()
    for value, times in values:
        histogram.observe(value, times)
        place = next((i for i, bound in enumerate(bounds) if value <= bound), len(bounds))
        expected[place] += times
    assert histogram.counts == [expected[place] for place in range(len(bounds) + 1)]
    assert histogram.sum == pytest.approx(sum(value * times for value, times in values))
    twice = Histogram(bounds)
    twice.add(histogram.snapshot())
    twice.add(histogram.snapshot())
    assert twice.counts == [2 * count for count in histogram.counts]


def test_the_catalogue_is_consistent() -> None:
    assert len(BY_NAME) == len(SERIES), "a name is declared twice"
    for series in SERIES:
        assert series.name.startswith(("sglang:", "setpoint:"))
        assert not series.name.endswith("_total"), series.name
        assert series.help.endswith("."), series.name
        assert not set(series.labels) & set(COMMON_LABELS[series.scope])
        assert (series.kind is Kind.HISTOGRAM) == bool(series.buckets)
        assert list(series.buckets) == sorted(set(series.buckets))


def read(harness: Harness) -> tuple[EngineMetrics, Figures]:
    """The figures of a run that is over."""
    figures = Figures(decode_log_interval=40)
    metrics = EngineMetrics(figures)
    readers = Tee(figures, metrics)
    for record in harness.recorder.records:
        readers.on(record)
    return metrics, figures


def test_a_run_is_counted() -> None:
    harness = Harness(num_pages=64, max_running_requests=2)
    for number in range(4):
        harness.submit(f"r{number}", range(8), max_new_tokens=3, ignore_eos=True)
    harness.drain()
    metrics, _ = read(harness)
    report = metrics.report()
    counters = report.counters
    assert counters["sglang:realtime_tokens"]["decode"] == 12
    tokens = counters["sglang:realtime_tokens"]
    assert tokens["prefill_compute"] + tokens["prefill_cache"] == 4 * 8
    first = counters["sglang:prefill_effective_tokens"]
    assert first == {"input": tokens["prefill_compute"], "device_hit": tokens["prefill_cache"]}
    assert sum(counters["sglang:cuda_graph_passes"].values()) == len(harness.recorder.steps)
    assert counters["setpoint:ended_requests"] == {"length": 4}
    assert counters["setpoint:queue_refusals"]["no_slot"] > 0
    waited = report.histograms["sglang:queue_time_seconds"][""]
    assert sum(waited["counts"]) == 4
    stages = report.histograms["sglang:per_stage_req_latency_seconds"]
    assert {name: sum(each["counts"]) for name, each in stages.items()} == {
        "prefill_waiting": 4,
        "prefill_forward": 4,
        "decode_forward": 4,
    }


def test_retracted_requests_are_counted_once_more_in_the_queue() -> None:
    harness = Harness(num_pages=64, conservativeness=0.1)
    for number in range(4):
        harness.submit(f"r{number}", range(10 * number, 10 * number + 6), max_new_tokens=30)
        harness.turn()
    harness.drain()
    metrics, figures = read(harness)
    retracted = figures.totals.retracted
    assert retracted > 0
    report = metrics.report()
    assert report.counters["sglang:num_retracted_requests"] == {"": retracted}
    assert report.counters["sglang:num_retracted_input_tokens"] == {"": 6 * retracted}
    assert report.counters["sglang:num_retracted_output_tokens"][""] > 0
    assert sum(report.histograms["sglang:queue_time_seconds"][""]["counts"]) == 4
    waits = report.histograms["sglang:per_stage_req_latency_seconds"]["prefill_waiting"]
    assert sum(waits["counts"]) == 4 + retracted


def test_the_throughput_of_an_engine_without_work_is_zero() -> None:
    harness = Harness()
    harness.submit("r", range(4), max_new_tokens=60, ignore_eos=True)
    harness.drain()
    metrics, figures = read(harness)
    assert figures.gen_throughput > 0
    assert metrics.report().gauges["sglang:gen_throughput"] == {"": figures.gen_throughput}
    metrics.on(Turn(harness.clock.now() + IDLE_S + 1))
    assert metrics.report().gauges["sglang:gen_throughput"] == {"": 0.0}


def test_everything_that_the_engine_says_is_declared() -> None:
    report = read(Harness())[0].report()
    for part, kind in (
        ("counters", Kind.COUNTER),
        ("gauges", Kind.GAUGE),
        ("histograms", Kind.HISTOGRAM),
    ):
        for name in getattr(report, part):
            assert BY_NAME[name].kind is kind
            assert BY_NAME[name].scope is Scope.SCHEDULER


def test_the_page_has_the_declared_series() -> None:
    """If this fails: python -m setpoint.observe.metrics_page."""
    present = PATH.read_text(encoding="utf-8")
    assert page(present) == present


def test_grammars_are_counted_by_their_outcome() -> None:
    figures = Figures(decode_log_interval=40)
    metrics = EngineMetrics(figures)
    for number, outcome in enumerate(("compiled", "compiled", "cached", "refused", "timed_out")):
        metrics.on(PreparationEnded("r", number, "regex", outcome, 0.3))
    report = metrics.report()
    counted = {
        name.removeprefix("sglang:num_grammar"): values[""]
        for name, values in report.counters.items()
        if name.startswith("sglang:num_grammar")
    }
    assert counted == {"": 5, "_cache_hit": 1, "_aborted": 1, "_timeout": 1}
    metrics.on(GrammarLate("r", 0, True))
    metrics.on(PreparationEnded("r", 0, "regex", "resumed", 0.3))
    counters = metrics.report().counters
    assert (counters["sglang:num_grammar"][""], counters["setpoint:late_grammars"][""]) == (5, 1)
    compiling = report.histograms["sglang:grammar_compilation_time_seconds"][""]
    assert sum(compiling["counts"]) == 2


def test_the_first_event_says_how_long_the_engine_took() -> None:
    class Kept(Wire):
        def send(self, message: ToFrontend) -> None:
            super().send(message)
            if isinstance(message, Tokens):
                events.extend(message.events)

    events: list[TokenEvent] = []
    harness = Harness(max_running_requests=1, wire=Kept())
    harness.submit("a", range(4), max_new_tokens=3, ignore_eos=True)
    harness.submit("b", range(5, 9), max_new_tokens=2, ignore_eos=True)
    harness.drain()
    timings = [(event.seq_id, event.timing) for event in events if event.timing is not None]
    assert [seq_id for seq_id, _ in timings] == [0, 1], "once for each"
    done = {record.rid: record for record in harness.recorder.of(RequestDone)}
    for (_, timing), record in zip(timings, (done["a"], done["b"]), strict=True):
        assert timing.waiting_s == record.admitted_at - record.accepted_at
        assert timing.prefill_s == record.first_token_at - record.admitted_at
