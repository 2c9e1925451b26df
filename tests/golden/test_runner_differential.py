"""Greedy ids on tiny models in float64 are bit-identical however the work is cut: chunks, pages,
batches, sharing, resumption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from setpoint.checkpoint.spec import read_spec
from setpoint.core.plan import OWN_LENGTH
from setpoint.core.sampling import SamplingParams
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.plans import Driver, allocate_rows

Make = Callable[[int], Driver]
CONTEXT = 128
RNG = np.random.default_rng(11)
PROMPTS = {
    slot: RNG.integers(3, 131, length).tolist()
    for slot, length in enumerate((37, 1, 16, 17, 50, 5))
}
RANDOM = SamplingParams(temperature=0.9, top_p=0.95)


CONFIGS = {golden.name: golden.config for golden in GOLDENS}
MODELS = (
    "llama: linear rope",
    "qwen3: windows by layer type",
    "phi3: 4 mini: tied, partial rotation, long list",
    "gemma2: caps, untied",
    "gemma3_text: two local to one global",
    "qwen3_moe: first layer dense, tied",
)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), CONFIGS[request.param])


@pytest.fixture(scope="module")
def driver_of(folder: Path, device: str) -> Make:
    def make(page_size: int) -> Driver:
        config = EngineConfig(
            str(folder),
            read_spec(folder),
            dtype="float64",
            kv_dtype="float64",
            page_size=page_size,
            num_threads=1,
            device=device,
        )
        runner = build_runner(config)
        pages = CONTEXT // page_size
        groups = allocate_rows(runner, num_rows=20 * pages, max_slots=20, context_len=CONTEXT)
        return Driver(InprocExecutor(runner), page_size, pages, groups)

    return make


@pytest.fixture(scope="module")
def wanted(driver_of: Make) -> dict[int, list[int]]:
    """Each prompt alone, in one chunk."""
    driver = driver_of(16)
    return {slot: driver.generate({slot: ids}, 24)[slot] for slot, ids in PROMPTS.items()}


@pytest.mark.cases(15)
@pytest.mark.parametrize(
    "page_size",
    [pytest.param(1, marks=pytest.mark.full), 4, pytest.param(16, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("chunk", ["1", "page-1", "page", "page+1", "big"])
def test_chunks_pages_and_batches(
    driver_of: Make, wanted: dict[int, list[int]], page_size: int, chunk: str
) -> None:
    """All prompts side by side: short ones decode while long ones are still in chunks, so steps mix
    both."""
    size = max(
        1,
        {
            "1": 1,
            "page-1": page_size - 1,
            "page": page_size,
            "page+1": page_size + 1,
            "big": 1 << 20,
        }[chunk],
    )
    assert driver_of(page_size).generate(PROMPTS, 24, chunk=size) == wanted


def test_rows_read_pages_that_another_row_of_the_same_step_fills(
    driver_of: Make, wanted: dict[int, list[int]]
) -> None:
    driver = driver_of(4)
    prompt = PROMPTS[4]
    plan = driver.plan()
    driver.admit(plan, 0, prompt)
    driver.admit(plan, 1, prompt, share=(0, 12))
    driver.admit(plan, 2, prompt[:33] + prompt[:10], share=(0, 8))
    # The readers stand before the row whose pages they read.
    plan.add_row(1, 1, 48, 2, 1)
    plan.add_row(2, 2, 32, 11, 1)
    plan.add_row(0, 0, 0, 50, 1)
    driver.run(plan)
    driver.decode([2, 0, 1], 23)
    alone = driver_of(4).generate({0: prompt[:33] + prompt[:10]}, 24)[0]
    assert driver.outputs[0] == driver.outputs[1] == wanted[4]
    assert driver.outputs[2] == alone


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        RANDOM,
        SamplingParams(temperature=1.2, frequency_penalty=1.0),
    ],
)
def test_resumption_continues_with_the_same_tokens(
    driver_of: Make, sampling: SamplingParams
) -> None:
    """A sequence admitted again with prior outputs goes on as if it had never stopped."""
    driver = driver_of(4)
    whole = driver.generate({3: PROMPTS[3]}, 30, sampling=sampling)[3]
    driver.generate({0: PROMPTS[4]}, 3)
    plan = driver.plan()
    driver.admit(
        plan, 7, PROMPTS[3] + whole[:13], num_prompt=len(PROMPTS[3]), sampling=sampling, seed=3
    )
    plan.add_row(7, 7, 0, len(PROMPTS[3]) + 13, 1)
    plan.add_row(0, 0, OWN_LENGTH, 1, 1)
    driver.run(plan)
    driver.decode([0, 7], 16)
    assert driver.outputs[7] == whole[13:]
    assert len(set(whole)) > 3


def test_random_tokens_do_not_depend_on_the_batch(driver_of: Make) -> None:
    alone = driver_of(4)
    wanted = {
        slot: alone.generate({slot: ids}, 20, sampling=RANDOM)[slot]
        for slot, ids in PROMPTS.items()
    }
    assert driver_of(4).generate(PROMPTS, 20, sampling=RANDOM) == wanted


def test_steps_may_be_submitted_before_the_result_is_taken(
    driver_of: Make, wanted: dict[int, list[int]]
) -> None:
    """Depth 1: a decode row follows a sampling row whose result nobody has seen."""
    driver = driver_of(4)
    plan = driver.plan()
    for slot, ids in PROMPTS.items():
        driver.admit(plan, slot, ids)
        plan.add_row(slot, slot, 0, len(ids), 1)
    pending = [driver.executor.submit(plan.build())]
    pending[0].finish(None)
    ids: dict[int, list[int]] = {slot: [] for slot in PROMPTS}
    for _ in range(23):
        plan = driver.plan()
        for slot in PROMPTS:
            plan.add_row(slot, slot, OWN_LENGTH, 1, 1)
        pending.append(driver.executor.submit(plan.build()))
        pending[-1].finish(None)
    for step in pending:
        result = step.result()
        for slot, token in zip(result.seq_ids.tolist(), result.token_ids.tolist(), strict=True):
            ids[slot].append(token)
    assert ids == wanted


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.2, frequency_penalty=1.0, repetition_penalty=1.1),
    ],
)
def test_forced_tokens_take_the_place_of_sampled_ones(
    driver_of: Make, sampling: SamplingParams
) -> None:
    """Rows that are told what they would have sampled go on as if they had, beside others."""
    driver = driver_of(4)
    wanted = driver.generate(PROMPTS, 24, sampling=sampling)
    plan = driver.plan()
    for slot, ids in PROMPTS.items():
        driver.admit(plan, slot, ids, sampling=sampling, seed=slot)
        plan.add_row(slot, slot, 0, len(ids), 1)
    driver.run(plan)
    for counts in ((0, 3, 0, 1, 15, 0), (2, 0, 7, 1, 0, 0), (0, 0, 0, 0, 0, 0), (4, 9, 1, 0, 1, 5)):
        plan = driver.plan()
        for slot, count in enumerate(counts):
            known = len(driver.outputs[slot])
            forced = wanted[slot][known : known + count]
            plan.add_row(slot, slot, OWN_LENGTH, 1 + count, 1 + count, forced)
        driver.run(plan)
    assert [len(outputs) for outputs in driver.outputs.values()] == [11, 17, 13, 7, 21, 10]
    for slot, outputs in driver.outputs.items():
        assert outputs == wanted[slot][: len(outputs)]


def test_slots_grow_when_a_higher_one_is_used(
    driver_of: Make, wanted: dict[int, list[int]]
) -> None:
    driver = driver_of(16)
    slots = driver.executor.runner.slots
    plan = driver.plan()
    driver.admit(plan, 0, PROMPTS[0])
    plan.add_row(0, 0, 0, 37, 1)
    driver.run(plan)
    assert len(slots.columns) == 16
    plan = driver.plan()
    driver.admit(plan, 19, PROMPTS[3])
    plan.add_row(19, 19, 0, 17, 1)
    driver.run(plan)
    assert len(slots.columns) == slots.padding_slot == len(slots.ids.tensor) - 1 == 20
    assert not slots.pages.tensor[slots.padding_slot].any()
    driver.decode([19, 0], 22)
    assert driver.outputs[19] == wanted[3][:23]
    assert driver.outputs[0] == wanted[0][:23]
