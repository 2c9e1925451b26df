"""Predicted effects on throughput: as the steps of a source are, and never beyond what can be."""

from __future__ import annotations

from typing import Any

import pytest
from doctor_cases import decode, prefill, rank, seen
from hypothesis import given
from hypothesis import strategies as st

from setpoint.core.moments import Moment
from setpoint.doctor.case import examine
from setpoint.doctor.checks.common import fixed_share_of, steps, throughput_effect
from setpoint.doctor.findings import Effect
from setpoint.doctor.step_times import DecodeStep, fixed_share

NOISE = 0.1
SIZES = [2, 4, 8, 12, 16, 16, 16, 16]


def lines(fixed_ms: float, ms: float, sizes: list[int], prompt_ms: float = 0.0) -> list[Moment]:
    """Decode lines of a server whose steps take so long; each stands for 40 steps at one size, and
    admits a prompt of 200 tokens for each second request."""
    found = []
    for size in sizes:
        # The line before had another size: a line is over the steps since then.
        for _ in range(3):
            admitted = size // 2
            found.append(prefill(admitted, 200 * admitted, 5, size, 0.5))
            took = fixed_ms + ms * size + prompt_ms * 200 * admitted / 40
            found.append(decode(size, 5, 0.5, gen_throughput=1000 * size / took))
    return found


def effect(moments: list[Moment], running: float, growth: float, **facts: Any) -> Effect:
    case = examine(seen(rank(moments), **facts))
    return throughput_effect(fixed_share_of(case, running), growth)


@pytest.mark.parametrize(("fixed_ms", "ms"), [(50.0, 0.0), (0.0, 5.0), (20.0, 2.0), (5.0, 5.0)])
@pytest.mark.parametrize("prompt_ms", [0.0, 1.0])
def test_the_steps_of_other_batch_sizes_tell(fixed_ms: float, ms: float, prompt_ms: float) -> None:
    found = effect(lines(fixed_ms, ms, SIZES, prompt_ms), 16, 2.0)
    per_request = ms + prompt_ms * 2.5
    true = 2 * (fixed_ms + 16 * per_request) / (fixed_ms + 32 * per_request)
    assert found.expected == pytest.approx(true, rel=0.15)
    assert found.low <= true <= found.high
    assert found.high - found.low < 0.9


def test_without_step_times_everything_that_is_possible_is() -> None:
    found = effect([], 8, 2.0)
    assert (found.low, found.high) == (1 - NOISE, 2 + NOISE)
    assert 1.2 < found.expected < 1.5


def test_a_device_that_is_known_moves_the_middle() -> None:
    gpu, cpu = (effect([], 16, 2.0, device=device) for device in ("gpu", "cpu"))
    assert cpu.expected < 1.25 < 1.5 < gpu.expected


def test_one_batch_size_tells_little_and_prompts_between_the_steps_something() -> None:
    same = effect(lines(20.0, 2.0, [16] * 12), 16, 2.0)
    assert same.high - same.low > 0.7
    # Half of these lines had nothing but prompts in between, which took most of the time.
    uneven = []
    for _ in range(20):
        uneven += [prefill(1, 1000, 5, 16, 0.5), decode(16, 5, 0.5, gen_throughput=160)]
        uneven.append(decode(16, 5, 0.5, gen_throughput=800))
    found = effect(uneven, 16, 2.0)
    assert found.high < same.high


def test_lines_of_a_busy_machine_promise_less() -> None:
    def noisy(factor: float) -> list[Moment]:
        speeds = [320 * (1 + factor * (-1) ** i) for i in range(12)]
        return [decode(16, 5, 0.5, gen_throughput=speed) for speed in speeds]

    calm, busy = effect(noisy(0.02), 16, 2.0), effect(noisy(0.4), 16, 2.0)
    assert busy.low < calm.low - 0.1
    assert busy.high > calm.high + 0.1


def test_a_moment_that_knows_its_busy_time_is_a_step_whatever_it_waited() -> None:
    moments = [
        Moment(at=i, seconds=1.0, num_decode=10, running=4.0, gen_throughput=40.0, busy_s=0.2)
        for i in range(5)
    ]
    found = steps(examine(seen(rank(moments))))
    assert found == [DecodeStep(0.02, 4.0, 0.0)] * 5


@pytest.mark.parametrize("left", [5e-324, 4e-16])
def test_what_rounding_leaves_of_an_idle_moment_is_no_step(left: float) -> None:
    """Found by the property test of every report: times of 0 s, and a division by their mean."""
    times = [left, 0.2, 0.2, left]
    moments = [Moment(at=i, num_decode=2, running=4.0, busy_s=s) for i, s in enumerate(times)]
    assert steps(examine(seen(rank(moments)))) == [DecodeStep(0.1, 4.0, 0.0)] * 2
    idle = [Moment(at=i, num_decode=2, running=4.0, busy_s=left) for i in range(4)]
    fixed = fixed_share_of(examine(seen(rank(idle))), 4.0)
    assert (fixed.low, fixed.high) == (0.0, 1.0)


@given(
    st.lists(st.tuples(st.floats(1e-4, 1e3), st.floats(1, 1e4), st.floats(0, 1e6)), max_size=30),
    st.floats(1, 4096),
    st.floats(1, 1000),
    st.sampled_from([None, "cpu", "gpu"]),
)
def test_no_source_predicts_what_cannot_be(
    rows: list[tuple[float, float, float]], running: float, growth: float, device: str | None
) -> None:
    fixed = fixed_share([DecodeStep(*row) for row in rows], running, device)
    assert 0 <= fixed.low <= fixed.share <= fixed.high <= 1
    low, expected, high = fixed.gains(growth)
    assert 1 - 1e-9 <= low <= expected <= high <= growth * (1 + 1e-9)
    # A smaller batch makes a step shorter, in proportion at best.
    low, expected, high = fixed.slowdowns(1 / growth)
    assert 1 / growth * (1 - 1e-9) <= low <= expected <= high <= 1 + 1e-9
