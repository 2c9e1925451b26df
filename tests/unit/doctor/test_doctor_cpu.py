"""What the doctor says of servers on a CPU: chunks that were made smaller
while the server runs, and effects beside pairs that were measured (docs/notebook.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor_cases import decode, rank, seen

from setpoint.core.moments import Moment
from setpoint.doctor.binding_limit import SchedulerLimits
from setpoint.doctor.case import examine
from setpoint.doctor.checks.common import fixed_share_of, throughput_effect
from setpoint.doctor.checks.prefill_budget import prefill_action
from setpoint.doctor.readers.info import facts_of
from setpoint.doctor.step_times import EVEN_BATCH, PROMPT_COST, chunk_gains


@pytest.mark.parametrize(("present", "start"), [(64, 512), (128, 512), (32, 2048)])
def test_a_chunk_below_its_start_value_goes_back_to_it_without_a_restart(
    present: int, start: int
) -> None:
    info = {"chunked_prefill_size": present, "device": "cpu"}
    case = examine(seen(rank([decode(4, 3, 0.3)] * 12)))
    case = replace(case, limits=SchedulerLimits(prefill_tokens=float(present)))
    changed = facts_of(info | {"start_values": {"chunked_prefill_size": start}}, engine="setpoint")
    action = prefill_action(replace(case, seen=replace(case.seen, facts=changed)))
    assert (action.flag, action.value, action.live) == ("--chunked-prefill-size", start, True)
    never = facts_of(info, engine="setpoint")
    assert not prefill_action(replace(case, seen=replace(case.seen, facts=never))).live


@pytest.mark.parametrize("measured", [1.14, 1.23])
def test_larger_chunks_gain_what_was_measured(measured: float) -> None:
    low, expected, high = chunk_gains(64, 256)
    assert low <= measured <= high
    assert expected == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("one_ms", "many_ms"), [(9.22, 60.1), (6.48, 38.0), (10.9, 55.0), (6.54, 36.2)]
)
@pytest.mark.parametrize("running", [1, 4, 8])
@pytest.mark.parametrize("prompts", [0.0, 4.0])
def test_more_requests_gain_what_was_measured(
    one_ms: float, many_ms: float, running: int, prompts: float
) -> None:
    """Steps of 1 and of 64 rows; a prompt token costs a part of what an output token does."""
    row = (many_ms - one_ms) / 63
    fixed = one_ms - row

    def step_s(rows: int) -> float:
        return (fixed + row * rows * (1 + PROMPT_COST["cpu"] * prompts)) / 1000

    moments = [
        Moment(
            at=float(at),
            seconds=1.0,
            num_decode=30,
            running=float(running),
            running_max=float(running),
            queue=9.0,
            usage=0.2,
            new_tokens=int(prompts * running * 30),
            busy_s=30 * step_s(running),
        )
        for at in range(20)
    ]
    case = examine(seen(rank(moments), device="cpu"))
    growth = 64 / running
    effect = throughput_effect(fixed_share_of(case, float(running)), growth)
    true = growth * step_s(running) / step_s(64)
    assert effect.low <= true <= effect.high
    assert effect.expected == pytest.approx(true, rel=0.25)
    assert EVEN_BATCH["cpu"] == pytest.approx(8.41 / 0.81, abs=1)
