"""Small models of every family on a GPU compute what the reference computes on the CPU, and sample its
tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from setpoint.core.sampling import SamplingParams
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels import ref
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.against_transformers import TOLERANCES, write_tiny
from setpoint_testing.gpu_device import CONTEXT, GPU, PAGE, SLOTS, device_runner
from setpoint_testing.graph_steps import FAMILIES, MIXTURES, steps
from setpoint_testing.plans import Driver
from setpoint_testing.runners import distance
from setpoint_testing.tiny_models import write_tiny_llama

pytestmark = GPU

BF16_TOLERANCE = 0.08
"""See ``runners.distance``."""


def reference_of(folder: Path) -> ModelRunner:
    runner = device_runner(folder, device="cpu")
    runner.backends = replace(runner.backends, ops=ref.RefOps())
    runner.allocate(
        num_pages=runner.num_groups * SLOTS * CONTEXT // PAGE, max_slots=SLOTS, context_len=CONTEXT
    )
    return runner


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_reference(
    family: str, dtype: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Rounding to bf16 may choose other experts, and other tokens from then on; so only the first
    logits are compared, and no mixtures."""
    if dtype == "bfloat16" and family in MIXTURES:
        pytest.skip("rounding may choose other experts")
    folder = write_tiny(tmp_path, FAMILIES[family].config)
    found, _ = steps(device_runner(folder, dtype=dtype), 1, SLOTS)
    expected, _ = steps(reference_of(folder), 1, SLOTS)
    pairs = [(one.cpu().float(), other.float()) for one, other in zip(found, expected, strict=True)
             if one is not None]  # fmt: skip
    if dtype == "bfloat16":
        error = distance(*pairs[0])
    else:
        spread = max(float(other.std()) for _, other in pairs)
        error = max(float((one - other).abs().max()) for one, other in pairs) / spread
    record_property("error", error)
    assert error < (BF16_TOLERANCE if dtype == "bfloat16" else TOLERANCES[dtype])


SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=5, temperature=1.3),
    SamplingParams(top_p=0.6),
    SamplingParams(min_p=0.2),
    SamplingParams(top_k=30, top_p=0.7, min_p=0.05),
    SamplingParams(frequency_penalty=1.5, presence_penalty=-0.5, repetition_penalty=1.2),
    SamplingParams(logit_bias=((4, 100.0), (9, -5.0)), temperature=0.5),
]


def test_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    """A number may fall onto the border between two tokens, which rounding moves; the tokens after
    that are others."""
    folder = write_tiny_llama(tmp_path)
    sampled = []
    for runner in (device_runner(folder), device_runner(folder, device="cpu")):
        driver = Driver(InprocExecutor(runner), PAGE, CONTEXT // PAGE, runner.num_groups)
        plan = driver.plan()
        for slot, sampling in enumerate(SAMPLINGS):
            driver.admit(plan, slot, list(range(3, 10 + slot)), sampling=sampling, seed=slot)
            plan.add_row(slot, slot, 0, 7 + slot, 1)
        driver.run(plan)
        driver.decode(range(len(SAMPLINGS)), steps=12)
        sampled.append([driver.outputs[slot] for slot in range(len(SAMPLINGS))])
    assert sampled[0][0] == sampled[1][0], "a greedy token needs no number"
    different = sum(one != other for one, other in zip(*sampled, strict=True))
    assert different <= 1, sampled


def test_the_gpu_runs_its_own_kernels(tmp_path: Path) -> None:
    report = device_runner(write_tiny_llama(tmp_path), dtype="bfloat16").report
    names = {"cuda": ("triton", "triton"), "cpu": ("cpu", "cpu")}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert (report.ops, report.attention) == names[device], report.fallbacks
