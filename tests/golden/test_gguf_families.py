"""GGUF files of each family against transformers with the dequantised weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from setpoint.checkpoint.spec import read_spec
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.quant.grouped import KernelExperts
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.planning.memory import weight_bytes
from setpoint_testing.against_transformers import TOLERANCES, measure
from setpoint_testing.conversion import converted_under
from setpoint_testing.gguf_families import CONFIGS, LENGTHS, mixed, write_model
from setpoint_testing.plans import Driver, allocate_rows

KINDS = {
    "Q4_0": lambda name: Kind.Q4_0,
    "Q4_1 and Q8_0": lambda name: Kind.Q8_0 if "down" in name else Kind.Q4_1,
    "Q4_K_M": mixed,
    "Q5_0 and Q5_1": lambda name: Kind.Q5_1 if "down" in name else Kind.Q5_0,
    "BF16": lambda name: Kind.BF16,
    "MXFP4": lambda name: Kind.MXFP4 if "_exps" in name else Kind.Q8_0,
}


def convert(path: Path) -> Path:
    return converted_under(path.parent / "cache", path)


def runner_of(folder: Path, dtype: str = "bfloat16") -> ModelRunner:
    spec = read_spec(folder)
    runner = build_runner(
        EngineConfig(str(folder), spec, dtype=dtype, kv_dtype=dtype, page_size=4, num_threads=2)
    )
    allocate_rows(runner, num_rows=64, max_slots=4, context_len=64)
    return runner


def logits_of(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    driver = Driver(InprocExecutor(runner), 4, 16, runner.num_groups)
    plan = driver.plan()
    driver.admit(plan, 0, ids)
    plan.add_row(0, 0, 0, len(ids), 1)
    return runner.forward(plan.build()).logits


def sum_of_logprobs(runner: ModelRunner, ids: list[int]) -> float:
    driver = Driver(InprocExecutor(runner), 4, 16, runner.num_groups)
    plan = driver.plan()
    wanted = RequestOptions(logprobs=LogprobOptions())
    driver.admit(plan, 0, ids, options=wanted, logprob_start=1)
    plan.add_row(0, 0, 0, len(ids), 1)
    return float(driver.run(plan).prompt_logprobs[0].values.sum(dtype=np.float64))


@pytest.mark.parametrize("kinds", ["Q4_1 and Q8_0", "Q4_K_M"])
def test_texts_are_as_likely_as_transformers_says(tmp_path: Path, kinds: str) -> None:
    """The likelihoods are computed in float32. Red before, when the blocks were rounded to
    bfloat16."""
    path, checkpoint = write_model(tmp_path, "llama/dense", KINDS[kinds])
    runner = runner_of(convert(path), "float32")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    rng = np.random.default_rng(3)
    for length in range(8, 32):
        ids = rng.integers(0, 320, length).tolist()
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        theirs = float(logprobs[range(length - 1), ids[1:]].sum())
        assert sum_of_logprobs(runner, ids) == pytest.approx(theirs, abs=0.01)


@pytest.mark.cases(5)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    path, checkpoint = write_model(tmp_path, architecture, KINDS["Q4_1 and Q8_0"])
    found = measure(
        convert(path),
        judged_by=checkpoint,
        dtype="float64",
        context_len=128,
        prompt_lengths=LENGTHS.get(architecture, (37, 1, 50)),
        num_new=6,
    )
    assert found.wrong == 0
    assert found.relative < TOLERANCES["float64"]
    assert found.parameters[0] == found.parameters[1] == found.parameters[2]


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    "kinds",
    [next(iter(KINDS)), *(pytest.param(each, marks=pytest.mark.full) for each in [*KINDS][1:])],
)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_answers_are_those_of_the_checkpoint_bit_for_bit(
    tmp_path: Path, architecture: str, kinds: str
) -> None:
    path, checkpoint = write_model(tmp_path, architecture, KINDS[kinds])
    folder = convert(path)
    spec = read_spec(folder)
    assert spec.mixture == read_spec(checkpoint).mixture
    kept, wide = runner_of(folder), runner_of(checkpoint)
    for ids in ([5], list(range(3, 36))):
        logits = logits_of(kept, ids)
        assert torch.equal(logits, logits_of(wide, ids))
        assert logits.isfinite().all()
    if kinds == "BF16" or spec.mixture is None:
        return
    for layer in (kept.model.model.layers[index] for index in spec.mixture.layers):
        mlp = getattr(layer, "mlp", None) or layer.block_sparse_moe
        assert isinstance(mlp.gate_up.packed, KernelExperts)
        assert isinstance(mlp.down.packed, KernelExperts)
        assert all(expert.gate_up_proj.blocks and expert.down.blocks for expert in mlp.experts)


@pytest.mark.cases(6)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_plan_of_memory_counts_the_blocks(tmp_path: Path, architecture: str) -> None:
    folder = convert(write_model(tmp_path, architecture, KINDS["Q4_0"])[0])
    planned = weight_bytes(read_spec(folder), 2, head_copied=True, blocks=True)
    # The panels of a router with five columns are padded to 32, a share only of so small a model.
    assert runner_of(folder).report.weight_bytes == pytest.approx(planned, rel=0.04)
