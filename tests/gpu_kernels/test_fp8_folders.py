"""Folders in fp8 as a GPU multiplies them, with kernels that are interpreted, and what blocks of other
kinds cost there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from setpoint.core.model import KeptBlocks
from setpoint.engine.executor.build_runner import EngineConfig, dequantised_blocks
from setpoint.engine.quant import linear_method
from setpoint.engine.quant.rounded import RoundedWeight
from setpoint_testing import interpreted_triton as interpreted_triton
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.quantised_folders import LLAMA, MIXTURE, quantise
from setpoint_testing.runners import distance, logits_of, runner_of
from setpoint_testing.specs import tiny_spec

BF16 = torch.bfloat16


@pytest.mark.cases(2)
@pytest.mark.parametrize("form", ["fp8 tensor", "fp8 blocks"])
@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=lambda config: config["model_type"])
def test_a_gpu_multiplies_the_codes_of_a_folder(
    config: dict, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its method runs on CPU tensors, too, where its kernels are interpreted."""
    folder, _ = quantise(write_tiny(tmp_path / "plain", config), tmp_path, form)
    expected = logits_of(runner_of(folder), 9)
    monkeypatch.setitem(linear_method.BLOCK_METHODS, "cpu", linear_method.BLOCK_METHODS["cuda"])
    runner = runner_of(folder, capture=False)
    kept = [each.packed for each in runner.model.modules() if getattr(each, "blocks", "")]
    assert kept
    assert all(isinstance(each, RoundedWeight) for each in kept)
    assert "not rounded" not in runner.report.weights
    assert 0 < distance(logits_of(runner, 9), expected) < 0.15


def test_scales_of_activations_that_are_not_used_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = quantise(write_tiny(tmp_path / "plain", LLAMA), tmp_path, "fp8 tensor")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.q_proj.input_scale"] = torch.tensor([0.01])
    save_file(tensors, file, {"format": "pt"})
    monkeypatch.setitem(linear_method.BLOCK_METHODS, "cpu", linear_method.BLOCK_METHODS["cuda"])
    weights = runner_of(folder, capture=False).report.weights
    assert weights.endswith(
        "; 2 have a scale of activations that is not used: each token has its own"
    )


@pytest.mark.parametrize(
    ("kinds", "quantization", "is_told"),
    [
        (("FP8",), None, False),
        (("Q4_K", "Q6_K"), None, True),
        (("FP8", "W8A8"), None, True),
        (("Q4_K", "Q6_K"), "unquant", False),
    ],
)
def test_what_dequantized_blocks_cost_on_a_gpu_is_told(
    kinds: tuple[str, ...], quantization: str | None, is_told: bool
) -> None:
    spec = tiny_spec(blocks=KeptBlocks(3 * 10**9, 10**9, 2 * 10**9, kinds, 0))
    config = EngineConfig("", spec, device="cuda", quantization=quantization)
    words = f"no product of this GPU takes {' and '.join(kinds)}; they take 6.00 GB instead of 2.00"
    told = [(each.what, each.why) for each in dequantised_blocks(config, native=True)]
    assert told == [("weights are dequantized to bfloat16", words)] * is_told
    assert not dequantised_blocks(replace(config, device="cpu"), native=True)
