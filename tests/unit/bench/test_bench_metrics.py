"""Figures of small runs, worked out by hand; arrival times."""

from __future__ import annotations

import math

import numpy as np
import pytest

from setpoint.bench import comparison
from setpoint.bench import run_metrics as metrics
from setpoint.bench.paced_load import arrival_times
from setpoint.bench.request_record import Prompt, RequestRecord
from setpoint.bench.run_metrics import Run
from setpoint.core.errors import ConfigError


def record(
    start: float,
    times: list[float],
    end: float,
    *,
    counts: list[int] | None = None,
    num_prompt: int = 10,
    error: str = "",
) -> RequestRecord:
    counts = [1] * len(times) if counts is None else counts
    made = RequestRecord(
        Prompt("", num_prompt, 4),
        started_at=start,
        ended_at=end,
        times=times,
        counts=counts,
        num_outputs=sum(counts),
    )
    made.error = error
    return made


def test_a_run_of_two_requests() -> None:
    run = Run(
        [
            record(100.0, [100.5, 101.0, 101.5], 101.5),
            record(101.0, [102.0, 104.0], 105.0, num_prompt=30),
        ],
        100.0,
        110.0,
        1.0,
    )
    figures = metrics.summary(run)
    assert figures["completed"] == 2
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (40, 5)
    assert (figures["request_throughput"], figures["input_throughput"]) == (0.2, 4.0)
    assert (figures["output_throughput"], figures["total_throughput"]) == (0.5, 4.5)
    assert (figures["mean_ttft_ms"], figures["median_ttft_ms"], figures["std_ttft_ms"]) == (
        750.0,
        750.0,
        250.0,
    )
    # TPOT: (1.5 - 0.5) / 2 and (4 - 1) / 1 seconds.
    assert figures["mean_tpot_ms"] == 1750.0
    # Gaps: 500, 500, 2000 ms.
    assert (figures["mean_itl_ms"], figures["median_itl_ms"], figures["max_itl_ms"]) == (
        1000.0,
        500.0,
        2000.0,
    )
    assert figures["p90_e2e_latency_ms"] == pytest.approx(1500 + 0.9 * 2500)
    assert figures["concurrency"] == pytest.approx((1.5 + 4.0) / 10)
    assert figures["max_concurrent_requests"] == 2
    # In the seconds 0, 1, 2, 3 and 4 of the run came 1, 2, 1, 0 and 1 tokens.
    assert metrics.tokens_per_second(run) == [1, 2, 1, 0, 1]
    assert figures["max_output_tokens_per_s"] == 2


def test_a_chunk_of_several_tokens_is_as_many_gaps() -> None:
    one = record(0.0, [1.0, 1.6], 1.6, counts=[2, 3])
    assert metrics.itls_s(one) == pytest.approx([0.2, 0.2, 0.2])
    assert metrics.tpot_s(one) == pytest.approx(0.6 / 4)


def test_tokens_of_chunks_without_counts_add_up_to_the_servers_sum() -> None:
    one = record(0.0, [0.5, 1.5], 2.0)
    one.num_outputs = 6
    assert metrics.tokens_per_second(Run([one], 0.0, 2.0, 0.0)) == [3.0, 3.0]


def test_errors_are_never_throughput() -> None:
    bad = record(0.0, [0.1, 0.2], 0.3, error="status 500: no")
    run = Run([record(0.0, [1.0], 1.0), bad, bad], 0.0, 2.0, 0.0)
    figures = metrics.summary(run)
    assert (
        figures["completed"],
        figures["total_output_tokens"],
        figures["total_input_tokens"],
    ) == (1, 1, 10)
    assert figures["max_concurrent_requests"] == 1
    assert metrics.tokens_per_second(run) == [0, 1]
    assert metrics.failures(run) == {"status 500: no": 2}
    nothing = metrics.summary(Run([bad], 0.0, 2.0, 0.0))
    assert (nothing["completed"], nothing["output_throughput"], nothing["mean_ttft_ms"]) == (
        0,
        0.0,
        0.0,
    )
    assert metrics.steady_state(Run([bad], 0.0, 2.0, 0.0)) is None


def test_steady_state_leaves_out_the_filling_and_the_emptying() -> None:
    # Two in flight from 1 s to 5 s, one before and after; a token every half second of each.
    two = Run([record(0.0, [1.0], 1.5), record(1.0, [1.2], 3.0)], 0.0, 3.0, 0.0)
    assert metrics.concurrency_per_second(two) == [1.0, 1.5, 1.0]
    first = record(0.0, [0.5 * k for k in range(1, 11)], 5.0)
    second = record(1.0, [1 + 0.5 * k for k in range(1, 11)], 6.0)
    steady = metrics.steady_state(Run([first, second], 0.0, 6.0, 0.0))
    assert steady == {
        "steady_begin": 1.0,
        "steady_duration": 4.0,
        "steady_concurrency": 2.0,
        "steady_output_throughput": (8 + 8) / 4,
        "steady_request_throughput": 1 / 4,
    }


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    run = Run(
        [record(0.0, [0.1, 0.2], 0.2), record(0.0, [0.3, 0.4], 0.4), record(0.0, [0.1, 0.9], 0.9)],
        0.0,
        2.0,
        0.0,
    )
    assert metrics.goodput(run, metrics.parse_goodput(["ttft:200", "e2el:500"])) == 0.5
    assert metrics.goodput(run, metrics.parse_goodput(["tpot:150"])) == 1.0
    for word in ("ttft", "ttft:x", "itl:5", "tpot:0"):
        with pytest.raises(ConfigError, match="--goodput takes"):
            metrics.parse_goodput([word])


def test_arrivals() -> None:
    assert arrival_times(3, math.inf, seed=0) == [0.0, 0.0, 0.0]
    times = arrival_times(4001, 50.0, seed=7)
    assert times[0] == 0.0
    assert times == arrival_times(4001, 50.0, seed=7) != arrival_times(4001, 50.0, seed=8)
    gaps = np.diff(times)
    # Exponential: mean 1/rate, as wide as its mean, memoryless; 4,000 gaps keep these within 5 %.
    assert gaps.mean() == pytest.approx(0.02, rel=0.05)
    assert gaps.std() == pytest.approx(0.02, rel=0.05)
    assert np.mean(gaps > 0.02) == pytest.approx(math.exp(-1), rel=0.05)


def test_no_winner_inside_the_noise() -> None:
    assert (
        comparison.verdict([2.0], [1.0], True) == "2.00 × (only one run, so the noise is unknown)"
    )
    assert comparison.verdict([2.0, 3.0], [1.0, 2.5], True) == "1.43 × (within the noise)"
    assert comparison.verdict([2.0, 3.0], [1.0, 1.5], True) == "2.00 ×, better"
    assert comparison.verdict([2.0, 3.0], [1.0, 1.5], False) == "2.00 ×, worse"
    assert comparison.verdict([1.0, 1.5], [2.0, 3.0], False) == "0.50 ×, better"
