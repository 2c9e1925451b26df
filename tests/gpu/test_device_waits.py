"""The host never waits for a GPU while it prepares and launches a step, whatever its requests want; and
what it sends is there before it is written again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from setpoint.core.plan import OWN_LENGTH, TokenMasks
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.runner.batch import ForwardBatch
from setpoint.engine.runner.step_block import StepBlock
from setpoint.engine.sampling.columns import SLOT_DTYPE, SamplingRows
from setpoint.engine.sampling.facts import SAMPLING_MASK
from setpoint_testing.gpu_device import CONTEXT, DEVICE, GPU, PAGE, REHEARSED, device_runner
from setpoint_testing.graph_steps import SIZES
from setpoint_testing.plans import Driver
from setpoint_testing.tiny_models import write_tiny_llama

pytestmark = GPU

GREEDY = SamplingParams(temperature=0.0)
KINDS = [
    (GREEDY, RequestOptions()),
    (SamplingParams(), RequestOptions()),
    (SamplingParams(top_k=5, top_p=0.8, min_p=0.05), RequestOptions()),
    (SamplingParams(frequency_penalty=1.0, repetition_penalty=1.3), RequestOptions()),
    (SamplingParams(logit_bias=((4, 3.0),), min_new_tokens=4), RequestOptions()),
    (GREEDY, RequestOptions(logprobs=LogprobOptions(start=0, top=3, ids=(5, 6)))),
    (SamplingParams(top_p=0.7), RequestOptions(token_facts=(SAMPLING_MASK,))),
    (GREEDY, RequestOptions(hidden_states=True)),
]
ALL = "all together, one with a mask"
STEPS = 6


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises an error."""
    if REHEARSED:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def generate(driver: Driver, which: list[int], *, masked: bool) -> list[list[int]]:
    """The tokens of these kinds of requests. Each step is launched before the result of the one
    before is taken."""
    plan = driver.plan()
    for slot in which:
        sampling, options = KINDS[slot]
        prompt = list(range(3, 12 + slot))
        driver.admit(
            plan, slot, prompt, sampling=sampling, seed=slot, options=options, stop_ids=(1, 2),
            logprob_start=-1 if options.logprobs is None else 1,
        )  # fmt: skip
        plan.add_row(slot, slot, 0, len(prompt), 1)
    words = np.full((1, 131 // 32 + 1), -1, np.int32)
    masks = TokenMasks(np.array(which[:1], np.int32), words) if masked else None
    before, results = None, []
    for _ in range(STEPS):
        built = plan.build()
        with no_waiting():
            step = driver.executor.submit(built)
        if before is not None:
            results.append(before.result())
        with no_waiting():
            step.finish(masks)
        before, plan = step, driver.plan()
        for slot in which:
            plan.add_row(slot, slot, OWN_LENGTH, 1, 1)
    results.append(before.result())
    assert [each.failures for each in results] == [{}] * STEPS
    driver.executor.submit(driver.plan().build(releases=tuple(which))).finish(None)
    return [each.token_ids.tolist() for each in results]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kind", [*range(len(KINDS)), ALL])
@pytest.mark.parametrize("with_graphs", [True, False])
def test_a_decode_loop_never_waits(kind: int | str, with_graphs: bool, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    sizes = {"sizes": SIZES} if with_graphs and not REHEARSED else {}
    runner = device_runner(folder, **sizes)
    driver = Driver(InprocExecutor(runner), PAGE, CONTEXT // PAGE, runner.num_groups)
    which = list(range(len(KINDS))) if kind == ALL else [int(kind)]
    first = generate(driver, which, masked=kind == ALL)
    assert generate(driver, which, masked=kind == ALL) == first
    assert {len(each) for each in first} == {len(which)}


def test_a_block_is_not_written_before_it_is_copied() -> None:
    """The device is busy while the host sends step after step; every step finds its own rows."""
    num_rows, num_steps = 64, 12
    block = StepBlock(DEVICE, num_rows)
    table = torch.zeros(num_rows + 1, 32, dtype=torch.int32, device=DEVICE)
    if not REHEARSED:
        assert all(host.is_pinned() for host in block._hosts)
    rng, sent, found = np.random.default_rng(0), [], []
    for step in range(num_steps):
        if not REHEARSED:
            torch.cuda._sleep(5_000_000)
        slots = rng.permutation(num_rows).astype(np.int32)
        lengths = np.full(num_rows, step + 1, np.int32)
        counts = np.arange(num_rows + 1, dtype=np.int32)
        batch = ForwardBatch(num_rows, slots, counts, lengths, lengths - 1, slots[:0], slots[:0])
        block.put(table, slots, lengths, slots + step)
        rows = SamplingRows(np.zeros(0, SLOT_DTYPE), slots[:0], table)
        block.send(batch, rows, num_rows=num_rows, padding_slot=num_rows)
        found.append((block.rows.slots.clone(), table[:num_rows, step + 1].clone()))
        sent.append((slots.tolist(), [slot + step for slot in range(num_rows)]))
    assert [tuple(each.tolist() for each in pair) for pair in found] == sent
