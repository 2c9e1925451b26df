"""A replay names the first thing that came out otherwise, and ends where the recorded engine
ended."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from setpoint.core import messages
from setpoint.core.plan import PageDeltas, Rows, StepPlan
from setpoint.core.records import Record, RequestAdmitted, StepDone
from setpoint.core.request import Request
from setpoint.core.sampling import SamplingParams
from setpoint.core.settings import PrioritySettings
from setpoint.recording import codec
from setpoint.recording.format import OFF, ON, KeptArrival
from setpoint.recording.kept_content import LEFT_OUT, Withheld
from setpoint.recording.replay import Outcome
from setpoint.scheduler.conservativeness import NewTokenRatio
from setpoint.scheduler.prefill import PrefillPlanner
from setpoint.scheduler.scheduler import Scheduler
from setpoint_testing.harness import Harness
from setpoint_testing.recordings import record, replayed
from setpoint_testing.scripted import ScriptedExecutor, hashed_token

CONTENTS = pytest.mark.parametrize("content", [OFF, ON])


def run(**config: Any) -> Harness:
    harness = Harness(page_size=2, **config)
    for number in range(6):
        harness.submit(f"r{number}", [7, 8, 9, number, number + 1], max_new_tokens=8)
        harness.turn(2)
    harness.drain()
    return harness


def replay_with(
    path: Path, step: int, change: Callable[[StepPlan], StepPlan], patch: pytest.MonkeyPatch
) -> Outcome:
    """The recording under a scheduler that plans this step otherwise."""
    schedule = Scheduler.schedule

    def changed(scheduler: Scheduler) -> StepPlan | None:
        plan = schedule(scheduler)
        return plan if plan is None or plan.step_id != step else change(plan)

    with patch.context() as inner:
        inner.setattr(Scheduler, "schedule", changed)
        return replayed(path)


@CONTENTS
@pytest.mark.parametrize("group", ["rows", "pages"])
def test_a_changed_plan_is_found_and_named(
    group: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number of each array of a plan."""
    harness = run()
    path = record(harness, tmp_path / "run", content=content)
    for field in fields(Rows if group == "rows" else PageDeltas):
        step, array = next(
            (step, array.copy())
            for step, plan in enumerate(harness.plans)
            if step > 3 and len(array := getattr(getattr(plan, group), field.name))
        )
        before, after = array.ravel().tolist(), array
        after.flat[-1] += 1

        def change(plan: StepPlan, name: str = field.name, value: Any = after) -> StepPlan:
            part = replace(getattr(plan, group), **{name: value})
            return replace(plan, **{group: part})

        outcome = replay_with(path, step, change, monkeypatch)
        assert outcome.num_steps == step
        named = f"{group}.{field.name} recorded {before}, replayed {after.ravel().tolist()}"
        assert f"plan of step {step}: {named}" in outcome.difference


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"releases": (5,)}, "releases recorded [], replayed [5]"),
        ({"step_id": 99}, "step_id recorded 0, replayed 99"),
        ({"admits": ()}, "admits recorded [[0, 0, 5, 5, -1, 0]], replayed []"),
    ],
)
def test_other_parts_of_a_plan(
    changed: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(run(), tmp_path / "run")
    outcome = replay_with(path, 0, lambda plan: replace(plan, **changed), monkeypatch)
    assert f"plan of step 0: {named}" in outcome.difference


def test_ids_are_compared_where_they_were_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_ids(plan: StepPlan) -> StepPlan:
        (admit,) = plan.admits
        return replace(plan, admits=(replace(admit, ids=admit.ids + 1),))

    path = record(run(), tmp_path / "run", content=ON)
    outcome = replay_with(path, 0, other_ids, monkeypatch)
    assert "plan of step 0: admits recorded" in outcome.difference


@CONTENTS
def test_a_scheduler_that_decides_otherwise_is_found(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The use of it: the same inputs under changed rules."""
    path = record(run(), tmp_path / "run", content=content)
    with monkeypatch.context() as patch:
        patch.setattr(PrefillPlanner, "plan", lambda self, builder, step: None)
        outcome = replayed(path)
        assert outcome.num_steps == 0
        assert "what comes next recorded" in outcome.difference or "raised" in outcome.difference
    with monkeypatch.context() as patch:
        patch.setattr(NewTokenRatio, "decay", lambda self, *settings: None)
        outcome = replayed(path)
        assert "StepDone: new_token_ratio recorded" in outcome.difference
    assert replayed(path).agrees


def test_an_output_too_many_and_one_too_few(tmp_path: Path) -> None:
    harness = run()
    records = harness.recorder.records
    at = next(
        index
        for index, each in enumerate(records)
        if isinstance(each, StepDone) and each.step_id == 3
    )
    more = replayed(
        record(harness, tmp_path / "more", records=[*records[:at], records[at], *records[at:]])
    )
    assert "recorded StepDone(3" in more.difference
    assert "replayed nothing in this turn" in more.difference
    less = replayed(record(harness, tmp_path / "less", records=[*records[:at], *records[at + 1 :]]))
    assert "recorded nothing in this turn, replayed StepDone(3" in less.difference


class Breaking(ScriptedExecutor):
    """Its fifth step takes the engine down."""

    def submit(self, plan: StepPlan) -> Any:
        if plan.step_id == 5:
            raise MemoryError("no room")
        return super().submit(plan)


@pytest.mark.parametrize("depth", [0, 1])
@CONTENTS
def test_a_crash_ends_where_it_ends(content: str, depth: int, tmp_path: Path) -> None:
    """The plan that was executed last is in the recording and is compared."""
    executor = Breaking(num_pages=64, page_size=1, next_token=hashed_token(97))
    harness = Harness(executor=executor, depth=depth)
    harness.submit("a", [1, 2, 3], max_new_tokens=30)
    with pytest.raises(MemoryError):
        harness.drain()
    outcome = replayed(record(harness, tmp_path / "run", content=content))
    assert outcome.agrees
    assert outcome.num_steps == 6
    assert not outcome.ended_by, "what broke is not in the scheduler"


def test_a_crash_of_the_scheduler_happens_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording is the test case: with the fault it ends where the engine ended; without, it
    goes on."""
    refuse = PrefillPlanner.refuse

    def broken(planner: PrefillPlanner, reason: Any, step: Any) -> None:
        refuse(planner, reason, step)
        raise ZeroDivisionError("a bug")

    harness = Harness(max_running_requests=1)
    harness.submit("a", [1, 2, 3], max_new_tokens=30)
    harness.turn(3)
    harness.submit("b", [4, 5, 6])
    with monkeypatch.context() as patch:
        patch.setattr(PrefillPlanner, "refuse", broken)
        with pytest.raises(ZeroDivisionError):
            harness.drain()
        path = record(harness, tmp_path / "run")
        assert replayed(path).ended_by == "ZeroDivisionError: a bug"
    outcome = replayed(path)
    assert outcome.agrees
    assert not outcome.ended_by


def test_every_kind_of_record_has_a_decision() -> None:
    assert set(codec._ENTRIES) == set(typing.get_args(Record))
    assert set(codec.field_names()) >= codec.MEASURED | codec.INPUTS


def test_every_field_of_a_request_and_every_message_has_a_decision() -> None:
    """A new field is kept, replaced, or left out with a reason; a message without content is kept
    whole."""
    kept = set(KeptArrival.__struct_fields__)
    for field in (*Request.__struct_fields__, *SamplingParams.__struct_fields__):
        assert (field in kept) != (field in LEFT_OUT), field
    assert set(typing.get_args(messages.ToLoop)) == Withheld.DECIDED


def test_every_field_of_a_record_that_holds_a_name_is_replaced(tmp_path: Path) -> None:
    """The type of a field tells whether it holds a name: a str or several, other than those which
    this engine's own words fill."""
    own_words = {"why", "what", "way", "error", "violations"}
    for kind in codec._KINDS.values():
        for field, hint in typing.get_type_hints(kind).items():
            if hint in (str, tuple[str, ...]):
                assert field in own_words | codec.NAMES, (kind, field)


def test_a_result_is_compared_by_what_follows_from_it(tmp_path: Path) -> None:
    """A token fewer in a result changes what is planned after it."""
    harness = run(max_tokens_per_row=3, num_tokens=lambda most: min(most, 2))
    path = record(harness, tmp_path / "run", content=ON)
    assert replayed(path).agrees
    assert np.mean([len(plan.rows) for plan in harness.plans]) > 1


def test_hidden_states_that_were_brought_may_come_out_of_the_cache(tmp_path: Path) -> None:
    """A sequence whose hidden states are wanted is computed whole, and after a preemption only
    where they are missing: the replay must know which were brought."""
    config = {"page_size": 1, "max_running_requests": 1, "priority": PrioritySettings(threshold=2)}
    harness = Harness(**config, num_pages=64)
    prompt = [5, 6, 7, 8, 9, 10, 11]
    harness.submit("a", prompt, max_new_tokens=9, hidden_states=True, priority=0)
    harness.turn(4)
    harness.submit("b", prompt, max_new_tokens=2, priority=9)
    harness.drain()
    assert harness.recorder.preemptions
    admitted = [each.num_cached for each in harness.recorder.of(RequestAdmitted)]
    assert admitted[0] == 0
    assert admitted[-1] > len(prompt)
    outcome = replayed(record(harness, tmp_path / "recording"))
    assert (outcome.difference, outcome.num_steps) == ("", len(harness.plans))
