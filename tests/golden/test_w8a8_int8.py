"""8-bit weights and activations: the definition by hand, the kernels against it bit for bit, and models that run on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import ConfigError
from setpoint.engine.executor.build import EngineConfig, build_runner
from setpoint.engine.quant.w8a8_int8 import quantize_rows
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.testing.tiny_models import write_tiny_llama

BF16, FP32 = torch.bfloat16, torch.float32


def test_rows_by_hand() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1e-38, 0.0, 0.0], [2.5, 127.0, -3.5], [1.0, torch.nan, 0.0], [-torch.inf, 1.0, 0.0]])
    numbers, scales = quantize_rows(x)
    assert numbers.tolist() == [[64, -127, 32], [0] * 3, [0] * 3, [2, 127, -4], [0] * 3, [0] * 3]
    assert scales[:4].tolist() == pytest.approx([2 / 127, 0, 0, 1])
    assert scales[4:].isnan().all()


def build(folder: Path, **options: object) -> ModelRunner:
    spec = read_spec(folder)
    return build_runner(EngineConfig(str(folder), spec, num_threads=1, quantization="w8a8_int8", **options))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_loaded_with_its_head_as_it_is(tmp_path: Path, tied: bool) -> None:
    folder = write_tiny_llama(tmp_path, tie_word_embeddings=tied)
    runner = build(folder, dtype="bfloat16")
    assert runner.report.linear.startswith("w8a8_int8")
    plain = build_runner(EngineConfig(str(folder), read_spec(folder), num_threads=1))
    x = torch.randn(3, 48).to(BF16)
    assert torch.equal(runner.model.lm_head(x), plain.model.lm_head(x))
    one, other = (built.model.model.layers[1].self_attn.qkv_proj(x) for built in (runner, plain))
    assert not torch.equal(one, other)
    assert torch.allclose(one.float(), other.float(), atol=0.02 * other.float().abs().max().item())


def test_a_model_of_transformers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization w8a8_int8 needs a model of this engine; LlamaForCausalLM runs on that of"):
        build(write_tiny_llama(tmp_path), model_impl="transformers")
