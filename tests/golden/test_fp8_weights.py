"""``--quantization fp8`` on CPUs: weights are rounded to E4M3 when they are loaded, and multiplied as
those of a folder in fp8 are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_quantised_folders import LLAMA, MIXTURE, distance, logits_of

from setpoint.core.errors import ConfigError
from setpoint.core.model import KeptBlocks
from setpoint.engine.executor.build_runner import EngineConfig, dequantised_blocks
from setpoint.engine.kernels.ops import SILU
from setpoint.engine.quant import blocks, fp8, linear_method
from setpoint.engine.quant.linear_method import GgufWeight
from setpoint.engine.quant.quantised_numbers import Numbers, block_rows
from setpoint.engine.quant.rounded import RoundedWeight
from setpoint.planning.memory import weight_bytes
from setpoint_testing import interpreted_triton as interpreted_triton
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.quantised_folders import quantise
from setpoint_testing.runners import runner_of
from setpoint_testing.specs import tiny_spec

BF16 = torch.bfloat16


def test_products_are_those_of_a_folder_with_these_numbers() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(48, 96), torch.randn(48), torch.randn(7, 96)
    weight, bias, x = weight.to(BF16), bias.to(BF16), x.to(BF16)
    numbers, scales = fp8.quantize_rows(weight, 96)
    rows = block_rows(Numbers(numbers.view(torch.uint8), scales, 96), 8, "FP8")
    folder = blocks.create(BF16)
    packed = fp8.create(BF16).pack(weight, bias)
    assert torch.equal(packed(x), folder.pack(GgufWeight("FP8", rows), bias)(x))
    gated = fp8.create(BF16).pack_gated(weight, bias, SILU)
    assert torch.equal(gated(x), folder.pack_gated(GgufWeight("FP8", rows), bias, SILU)(x))
    reference = fp8.create_reference(BF16).pack(weight, bias)
    assert torch.allclose(packed(x).float(), reference(x).float(), rtol=2**-7, atol=1e-2)
    assert reference.num_bytes == 48 * 96 + 4 * 48 + 2 * 48
    with pytest.raises(ConfigError, match="one with 40"):
        fp8.create(BF16).pack(torch.randn(8, 40).to(BF16), None)


@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=lambda config: config["model_type"])
def test_a_model_answers_nearly_as_before(tmp_path: Path, config: dict) -> None:
    folder = write_tiny(tmp_path, config)
    runner = runner_of(folder, quantization="fp8")
    assert runner.report.linear == "fp8_cpu"
    assert runner.report.weights == "fp8"
    expected = weight_bytes(runner.spec, 2, head_copied=True, rounded=36 / 32)
    assert 0.9 * expected < runner.report.weight_bytes <= expected
    assert 0 < distance(logits_of(runner, 20), logits_of(runner_of(folder), 20)) < 0.15


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
