"""The times of a step's products follow from the measured times of products, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from setpoint.core.model import Mixture
from setpoint.planning.pace import Stored, products_s, rising, seconds_of

CURVE = {1: 2.0, 16: 3.5, 64: 8.3}


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [(1, 2.0), (0.5, 2.0), (6, 2.5), (16, 3.5), (40, 5.9), (64, 8.3), (128, 16.6)],
)
def test_between_two_measurements_a_line_and_beyond_them_the_same_rate(
    rows: float, seconds: float
) -> None:
    assert seconds_of(CURVE, rows) == pytest.approx(seconds)


def test_a_dense_model_reads_each_weight_once_and_the_head_for_what_is_sampled() -> None:
    stored = (Stored("Q4_K", layers=100), Stored("Q6_K", layers=10, head=7))
    times = {"Q4_K": CURVE, "Q6_K": {1: 10.0, 64: 10.0}}
    found = products_s(stored, times, None, num_tokens=64, num_sampled=1)
    assert found == pytest.approx(100 * 8.3 + 10 * 10.0 + 7 * 10.0)


def test_a_mixture_reads_the_experts_that_its_tokens_use() -> None:
    """One of four experts for a token: two tokens use 1 - (3/4)² of them, with 2 · 1 / (4 · 7/16)
    rows each."""
    mixture = Mixture(4, 1, 10, frozenset({0}))
    stored, times = (Stored("Q4_K", layers=5, experts=40),), {"Q4_K": {1: 1.0, 3: 3.0}}
    one = products_s(stored, times, mixture, num_tokens=1, num_sampled=1)
    assert one == pytest.approx(5 * 1.0 + 40 / 4 * 1.0)
    two = products_s(stored, times, mixture, num_tokens=2, num_sampled=2)
    assert two == pytest.approx(5 * 2.0 + 40 * 7 / 16 * (2 / (4 * 7 / 16)))


@given(curve=st.dictionaries(st.integers(1, 512), st.floats(1e-15, 1e3), min_size=1))
def test_a_time_that_other_programs_have_stretched_does_not_count(curve: dict[int, float]) -> None:
    """Red before: on a busy machine one stream had 5.7 tokens/s, and 16 streams together 481."""
    found = [time for _, time in sorted(rising(curve).items())]
    assert found == sorted(found)
    for rows, time in rising(curve).items():
        assert time == min(curve[more] for more in curve if more >= rows)
