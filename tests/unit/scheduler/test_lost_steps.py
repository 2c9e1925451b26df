"""A step for which the device has too little memory: every request gets the tokens that it gets
otherwise, chunks stay smaller, and the second such step ends the engine with what would fit."""

from __future__ import annotations

from typing import Any

import pytest

from setpoint.core.errors import OutOfMemoryError
from setpoint.core.records import Fallback, StepDone, StepLost, TransferEnded
from setpoint.scheduler.scheduler_config import TierConfig
from setpoint_testing.harness import Harness
from setpoint_testing.lacking import Lacking
from setpoint_testing.recordings import record, replayed

SHARED = [30 + at for at in range(12)]
"""A prefix of all prompts, which the prefix cache has for the later ones."""
EOS = frozenset(range(12))
"""Ends some sequences in the step before one that has a row of them."""


def run(lost: set[int], where: str = "forward", depth: int = 1, **config: Any) -> Harness:
    sizes = {"num_pages": 96, "page_size": 4}
    harness = Harness(
        executor=Lacking(lost, where, **sizes),
        depth=depth,
        chunked_prefill_size=16,
        max_running_requests=4,
        strict_accounting=True,
        eos_token_ids=EOS,
        **sizes,
        **config,
    )
    for number in range(6):
        prompt = [*SHARED, *range(number, 3 * number + 9)]
        harness.submit(f"r{number}", prompt, max_new_tokens=10)
        harness.turn()
    harness.drain()
    return harness


def tokens(harness: Harness) -> dict[str, list[int]]:
    return {rid: outcome.ids for rid, outcome in harness.outcomes.items()}


GOOD = tokens(run(set()))


@pytest.mark.parametrize("where", ["before", "forward", "sampling"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("step", range(16))
def test_every_request_gets_its_tokens(where: str, depth: int, step: int) -> None:
    harness = run({step}, where, depth)
    assert tokens(harness) == GOOD
    (lost,) = harness.recorder.of(StepLost)
    assert (lost.step_id, lost.sampling) == (step, where == "sampling")
    assert step not in [done.step_id for done in harness.recorder.of(StepDone)]


def test_chunks_stay_half_as_large_and_it_is_told() -> None:
    harness = run({3})
    sizes = [int(plan.rows.counts.sum()) for plan in harness.plans]
    prompts = [done.num_new_tokens for done in harness.recorder.of(StepDone)]
    assert max(sizes[:4]) == 16
    assert max(prompts[3:]) == 8
    (told,) = harness.recorder.of(Fallback)
    assert told.what == "a step computes at most 8 prompt tokens"
    assert told.why.startswith("Prefill out of memory: out of memory. Tried to allocate 2.00 GiB; ")
    assert "--mem-fraction-static that is 0.03 (2048 MiB) lower" in told.why
    for flag in ("--chunked-prefill-size", "--max-running-requests"):
        assert flag in told.why


def test_without_chunks_prompts_are_divided_from_then_on() -> None:
    sizes = {"num_pages": 96, "page_size": 4}
    harness = Harness(
        executor=Lacking({0}, "forward", **sizes),
        chunked_prefill_size=None,
        max_prefill_tokens=32,
        **sizes,
    )
    harness.submit("a", range(40), max_new_tokens=3)
    harness.drain()
    assert [int(plan.rows.counts.sum()) for plan in harness.plans] == [40, 16, 16, 8, 1, 1]


def test_a_later_change_of_settings_does_not_take_the_limit_back() -> None:
    harness = run({3})
    harness.change(chunked_prefill_size=16)
    harness.submit("late", [*range(50, 80)], max_new_tokens=2)
    begin = len(harness.plans)
    harness.drain()
    assert max(int(plan.rows.counts.sum()) for plan in harness.plans[begin:]) == 8


@pytest.mark.parametrize("where", ["forward", "sampling"])
def test_the_second_time_the_engine_ends(where: str) -> None:
    with pytest.raises(OutOfMemoryError) as raised:
        run({3, 9}, where)
    words = str(raised.value)
    assert (
        "Tried to allocate 2.00 GiB. What would fit: a --mem-fraction-static that is 0.03" in words
    )
    assert "--chunked-prefill-size (now 8)" in words
    assert "--max-running-requests (now 4)" in words
    assert "--cuda-graph-max-bs" in words


def test_an_engine_that_computes_with_others_ends_at_once() -> None:
    sizes = {"num_pages": 96, "page_size": 4}
    harness = Harness(executor=Lacking({1}, "forward", is_final=True, **sizes), **sizes)
    harness.submit("a", SHARED, max_new_tokens=8)
    with pytest.raises(OutOfMemoryError, match="What would fit"):
        harness.drain()


def test_saves_that_wait_for_a_lost_step_end() -> None:
    """Another sequence may have planned to write what is to be saved."""
    reasons = set()
    for step in range(16):
        harness = run({step}, tiers=TierConfig(block=4, threshold=4), stored={})
        assert tokens(harness) == GOOD
        reasons.update(ended.why for ended in harness.recorder.of(TransferEnded))
    assert "a step was lost" in reasons


def test_nothing_of_a_lost_step_is_saved() -> None:
    """A save that waits for the step ends without one; what is computed again is saved."""
    stored: dict[Any, Any] = {}
    config = TierConfig(block=4, threshold=4)
    good: dict[Any, Any] = {}
    for where, found in (({6}, stored), (set(), good)):
        harness = run(where, tiers=config, stored=found)
        assert tokens(harness) == GOOD
    assert stored
    for key, data in stored.items():
        if key in good:
            assert (data == good[key]).all()


@pytest.mark.parametrize("where", ["forward", "sampling"])
@pytest.mark.parametrize("lost", [{3}, {3, 9}])
def test_a_recording_replays(where: str, lost: set[int], tmp_path: Any) -> None:
    sizes = {"num_pages": 96, "page_size": 4}
    harness = Harness(executor=Lacking(lost, where, **sizes), depth=1, **sizes)
    for number in range(4):
        harness.submit(f"r{number}", [*SHARED, number], max_new_tokens=10)
        harness.turn()
    if len(lost) == 1:
        harness.drain()
    else:
        with pytest.raises(OutOfMemoryError):
            harness.drain()
    outcome = replayed(record(harness, tmp_path / "run"))
    assert outcome.difference == "", outcome
    assert bool(outcome.ended_by) == (len(lost) == 2)
