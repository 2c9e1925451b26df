"""A prefill and a decode engine under faults: every request ends with the tokens that it gets alone
(``testing.simulation.handover``)."""

from __future__ import annotations

import pytest

from setpoint.core.records import HandedOver
from setpoint.testing.simulation.handover import Faults, Run

ALL = Faults(
    abort_prefill=0.02,
    abort_decode=0.02,
    lost_connection=0.01,
    torn=0.01,
    duplicate_room=0.05,
    prefill_never_comes=0.03,
    decode_never_comes=0.03,
    damaged_first_token=0.02,
)


@pytest.mark.parametrize("seed", range(25))
def test_without_faults_every_prompt_moves(seed: int) -> None:
    run = Run(seed, Faults())
    run.run(12)
    failures = [each.why for each in run.decode.recorder.of(HandedOver)]
    assert failures == [""] * 12
    assert all(each.finish.type == "length" for each in run.prefill.outcomes.values())
    computed = sum(each.num_new_tokens for each in run.decode.recorder.steps)
    assert computed <= 12 * (1 + run.decode.cache.page_size)  # the last page's, and the token


@pytest.mark.parametrize("seed", range(40))
def test_faults_change_no_token(seed: int) -> None:
    Run(seed, ALL).run(12)


@pytest.mark.full
@pytest.mark.parametrize("block", range(20))
def test_faults_change_no_token_in_many_runs(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        Run(seed, ALL).run(14)
