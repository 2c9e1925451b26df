"""More sampling rows than the memory plan counts logits for are sampled block by block, with the
same outcome."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from setpoint.checkpoint.spec import read_spec
from setpoint.core.plan import TokenMasks
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.core.result import StepResult
from setpoint.core.sampling import SamplingParams
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.runner import model_runner
from setpoint_testing.plans import Driver
from setpoint_testing.tiny_models import write_tiny_llama

WIDTHS = {0: (0, ()), 1: (3, (5, 6)), 2: (1, ()), 3: (0, (7,)), 4: (2, ())}
"""Slot -> top logprobs and named tokens it asks for."""


def run(folder: Path) -> StepResult:
    spec = read_spec(folder)
    runner = build_runner(
        EngineConfig(str(folder), spec, dtype="float32", kv_dtype="float32", num_threads=1)
    )
    runner.allocate(num_pages=160, max_slots=8, context_len=32)
    driver = Driver(InprocExecutor(runner), 1, 32)
    plan = driver.plan()
    for slot, (num_top, picked) in WIDTHS.items():
        prompt = [3 + slot, 9, 11]
        sampling = SamplingParams(temperature=0.0 if slot == 2 else 0.8)
        driver.admit(
            plan,
            slot,
            prompt,
            sampling=sampling,
            options=RequestOptions(
                logprobs=LogprobOptions(top=num_top, ids=picked) if slot else None
            ),
        )
        plan.add_row(slot, slot, 0, len(prompt), 1)
    words = np.zeros((2, -(-spec.vocab_size // 32)), np.int32)
    words[0, 1], words[1, 2] = 1, 1  # slot 4 may only take token 32, slot 1 only token 64
    return driver.run(plan, TokenMasks(np.array([4, 1], np.int32), words))


@pytest.mark.parametrize("block", [1, 2, 3])
def test_blocks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    folder = write_tiny_llama(tmp_path)
    whole = run(folder)
    monkeypatch.setattr(model_runner, "logits_rows", lambda device: block)
    cut = run(folder)
    assert cut.token_ids.tolist() == whole.token_ids.tolist()
    assert (whole.token_ids[4], whole.token_ids[1]) == (32, 64)
    assert cut.output_logprobs.keys() == whole.output_logprobs.keys() == {1, 2, 3, 4}
    for slot, (num_top, picked) in list(WIDTHS.items())[1:]:
        ours, wanted = cut.output_logprobs[slot], whole.output_logprobs[slot]
        assert ours.top_values.shape == (1, num_top)
        assert ours.picked.shape == (1, len(picked))
        np.testing.assert_allclose(ours.values, wanted.values, atol=1e-6)
        np.testing.assert_allclose(ours.top_values, wanted.top_values, atol=1e-6)
        np.testing.assert_allclose(ours.picked, wanted.picked, atol=1e-6)
