"""``--quantization fp8`` on CPUs: weights are rounded to E4M3 when they are loaded, and multiplied as
those of a folder in fp8 are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from setpoint.core.errors import ConfigError
from setpoint.engine.kernels.ops import SILU
from setpoint.engine.quant import blocks, fp8
from setpoint.engine.quant.linear_method import GgufWeight
from setpoint.engine.quant.quantised_numbers import Numbers, block_rows
from setpoint.planning.memory import weight_bytes
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.quantised_folders import LLAMA, MIXTURE
from setpoint_testing.runners import distance, logits_of, runner_of

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
