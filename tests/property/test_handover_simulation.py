"""A prefill and a decode engine under faults: every request ends with the tokens that it gets alone
(``setpoint_testing.simulation.handover``)."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from setpoint.core.records import HandedOver, TransferEnded
from setpoint.core.transfers import Direction, KVLocation
from setpoint.recording.format import ON
from setpoint_testing.recordings import record, replayed
from setpoint_testing.simulation.handover import Faults, Run

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


@pytest.mark.cases(13)
@pytest.mark.parametrize("seed", range(25))
def test_without_faults_every_prompt_moves(seed: int) -> None:
    run = Run(seed, Faults())
    run.run(12)
    failures = [each.why for each in run.decode.recorder.of(HandedOver)]
    assert failures == [""] * 12
    assert all(each.finish.type == "length" for each in run.prefill.outcomes.values())
    computed = sum(each.num_new_tokens for each in run.decode.recorder.steps)
    assert computed <= 12 * (1 + run.decode.cache.page_size)  # the last page's, and the token


@pytest.mark.cases(16)
@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_faults_change_no_token(seed: int, tiers: bool) -> None:
    Run(seed, ALL, tiers=tiers).run(12)


@pytest.mark.cases(8)
@pytest.mark.parametrize("seed", range(40))
def test_decode_does_not_wait_for_what_prefill_has_aborted(seed: int) -> None:
    """Nothing but aborts, at every point of a request: no other fault ends a wait."""
    Run(seed, Faults(abort_prefill=0.2)).run(12)


@pytest.mark.cases(11)
@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_recordings_of_both_engines_are_replayed(seed: int, tiers: bool, tmp_path: Path) -> None:
    run = Run(seed, ALL, tiers=tiers)
    run.run(12)
    for name, side in (("prefill", run.prefill), ("decode", run.decode)):
        outcome = replayed(record(side, tmp_path / name, content=ON))
        assert outcome.agrees, (name, outcome)
        assert outcome.num_steps == len(side.recorder.steps)


def test_both_engines_use_the_store() -> None:
    moved = dict.fromkeys(product(("prefill", "decode"), Direction), 0)
    for seed in range(20):
        run = Run(seed, ALL, tiers=True)
        run.run(12)
        for name, side in (("prefill", run.prefill), ("decode", run.decode)):
            for each in side.recorder.of(TransferEnded):
                if each.place is KVLocation.STORAGE:
                    moved[name, each.direction] += each.num_tokens
    assert all(moved.values()), moved


@pytest.mark.full
@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("block", range(20))
def test_faults_change_no_token_in_many_runs(block: int, tiers: bool) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        Run(seed, ALL, tiers=tiers).run(14)
