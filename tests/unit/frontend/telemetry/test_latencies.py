"""Latencies of clients by the second: quantiles within the resolution, the right seconds, and no
more memory than was meant."""

from __future__ import annotations

import random

import pytest

from setpoint.core.moments import quantile
from setpoint.frontend.telemetry import latencies
from setpoint.frontend.telemetry.latencies import STEP, Latencies


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_within_the_resolution(seed: int) -> None:
    chance = random.Random(seed)
    seen = Latencies()
    firsts = sorted(chance.lognormvariate(-1, 1) for _ in range(500))
    between = sorted(chance.lognormvariate(-4, 0.5) for _ in range(2000))
    for value in chance.sample(firsts, len(firsts)):
        seen.first(value, 100.5)
    for value in between:
        seen.between(value, 1, 100.9)
    found = seen.quantiles(seen._epoch + 100, 1.0)
    for name, values in (("ttft", firsts), ("itl", between)):
        for share in (50, 95, 99):
            exact = quantile(values, share / 100)
            assert exact / STEP <= found[f"{name}_p{share}"] <= exact * STEP, (name, share)


def test_each_second_has_its_own() -> None:
    seen = Latencies()
    for second in range(10, 20):
        seen.first(0.001 * second, second + 0.3)
        seen.between(0.01 * second, 3, second + 0.99)
    for second in range(10, 20):
        found = seen.quantiles(seen._epoch + second, 1.0)
        assert found["ttft_p50"] == pytest.approx(0.001 * second, rel=0.05)
        assert found["itl_p99"] == pytest.approx(0.01 * second, rel=0.05)
    # A moment does not begin at a whole second: each second is in one of two neighbours.
    assert seen.quantiles(seen._epoch + 10.7, 1.0)["itl_p50"] == pytest.approx(0.11, rel=0.05)
    assert seen.quantiles(seen._epoch + 30, 1.0) == {}
    assert seen.quantiles(seen._epoch - 30, 1.0) == {}
    assert Latencies().quantiles(0.0, 1e12) == {}


def test_any_value_counts_and_old_seconds_go(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Latencies()
    for value in (0.0, -1.0, 1e-9, 1e9, float("inf")):
        seen.first(value, 5.0)
        seen.between(value, 2, 5.0)
    found = seen.quantiles(seen._epoch + 5, 1.0)
    assert found["ttft_p50"] == pytest.approx(latencies.LEAST_S, rel=0.05)
    assert found["itl_p99"] == pytest.approx(latencies.MOST_S, rel=0.05)
    for second in range(2000):
        seen.between(0.01, 1, float(second + 10))
    assert len(seen._seconds) == latencies.KEPT_S
