"""8-bit weights and activations: the definition by hand, the kernels against it bit for bit, and
models that run on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import ConfigError
from setpoint.core.records import Fallback
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels.ops import GELU_TANH, SILU, KernelsUnavailable
from setpoint.engine.quant import w8a8_int8, w8a8_int8_cpu
from setpoint.engine.quant.linear_method import PackedWeight
from setpoint.engine.quant.w8a8_int8 import block_size, quantize_rows, rotate
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.planning.memory import weight_bytes
from setpoint_testing.cpu_levels import each_level
from setpoint_testing.plans import Driver
from setpoint_testing.tiny_models import write_tiny_llama

BF16, FP32 = torch.bfloat16, torch.float32


def test_rows_by_hand() -> None:
    x = torch.tensor(
        [
            [1.0, -2.0, 0.5],
            [0.0, 0.0, 0.0],
            [1e-38, 0.0, 0.0],
            [2.5, 127.0, -3.5],
            [1.0, torch.nan, 0.0],
            [-torch.inf, 1.0, 0.0],
        ]
    )
    numbers, scales = quantize_rows(x)
    assert numbers.tolist() == [[64, -127, 32], [0] * 3, [0] * 3, [2, 127, -4], [0] * 3, [0] * 3]
    assert scales[:4].tolist() == pytest.approx([2 / 127, 0, 0, 1])
    assert scales[4:].isnan().all()


SHAPES = [(96, 64), (70, 37), (1, 2), (33, 576), (31, 3), (64, 1536)]
"""Columns and K: whole panels and words, and neither."""


def packed(
    columns: int, k: int, dtype: torch.dtype, level: str | None, *, bias: bool = False
) -> tuple[PackedWeight, PackedWeight]:
    """The same random weight by the kernel and by the reference; some channels of it are
    special."""
    torch.manual_seed(columns)
    weight = torch.randn(columns, k).to(dtype)
    weight[0] *= 1e-3
    if columns > 2:
        weight[1] = 0
        weight[2, 0] = 1000
    vector = torch.randn(columns).to(dtype) if bias else None
    return w8a8_int8_cpu.create(dtype, level=level).pack(weight, vector), w8a8_int8.create(
        dtype
    ).pack(weight, vector)


def activations(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Ordinary rows, then one of zeros, one too small to have a scale, one of nothing but the
    extremes, one with an outlier."""
    x = torch.randn(rows + 4, k)
    x[rows:] = 0
    x[rows + 1] = 1e-37
    x[rows + 2] = torch.tensor([3.0, -3.0]).repeat(k)[:k]
    x[rows + 3, -1] = 1e30
    return x.to(dtype)


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("columns", "k"), SHAPES)
def test_every_level_computes_the_definition_and_a_row_knows_no_batch(
    columns: int, k: int, dtype: torch.dtype, level: str
) -> None:
    kernel, reference = packed(columns, k, dtype, level)
    x = activations(119, k, dtype)
    result = kernel(x)
    assert torch.equal(result, reference(x))
    for rows in (*range(1, 27), 48, 49, 122):
        assert torch.equal(kernel(x[-rows:]), result[-rows:])


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_bias_is_added_with_at_most_one_rounding_more(dtype: torch.dtype, level: str) -> None:
    kernel, reference = packed(70, 36, dtype, level, bias=True)
    x = activations(20, 36, dtype)
    tolerance = 2e-6 if dtype == FP32 else 2**-7
    assert torch.allclose(kernel(x), reference(x), rtol=tolerance, atol=tolerance)
    assert kernel.num_bytes >= 70 * 36 + 70 * 8 + 70 * dtype.itemsize


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_nan_and_infinity_are_not_hidden(dtype: torch.dtype, level: str) -> None:
    """Not in an activation, where they spoil their row, and not in a weight, where they spoil their
    channel."""
    kernel, _ = packed(70, 36, dtype, level)
    x = activations(20, 36, dtype)
    expected = kernel(x)
    bad = [3, 7, 19]
    x[bad[0], 5], x[bad[1], 35], x[bad[2], 0] = torch.nan, torch.inf, -torch.inf
    result = kernel(x)
    assert result[bad].isnan().all()
    good = [row for row in range(len(x)) if row not in bad]
    assert torch.equal(result[good], expected[good])
    weight = torch.randn(5, 8).to(dtype)
    weight[3, 2] = torch.nan
    result = w8a8_int8_cpu.create(dtype, level=level).pack(weight, None)(activations(2, 8, dtype))
    assert result[:, 3].isnan().all()
    assert result[:, [0, 1, 2, 4]].isfinite().all()


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("size", "k", "bias"), [(48, 64, False), (37, 36, True), (1, 6, False), (1536, 64, True)]
)
def test_a_gated_layer_is_its_activation_of_both_products(
    size: int, k: int, bias: bool, dtype: torch.dtype, level: str
) -> None:
    torch.manual_seed(size)
    weight = torch.randn(2 * size, k).to(dtype)
    vector = torch.randn(2 * size).to(dtype) if bias else None
    x = activations(70, k, dtype)[:-1]
    wide = None if vector is None else vector.float()
    # The product's definition sees numbers of the dtype; what it gives is not to be rounded before
    # the activation.
    exact = w8a8_int8.create(FP32).pack(weight.float(), wide)(x.float())
    method = w8a8_int8_cpu.create(dtype, level=level)
    for gate, activation in (
        (SILU, torch.nn.functional.silu),
        (GELU_TANH, lambda v: torch.nn.functional.gelu(v, approximate="tanh")),
    ):
        kernel = method.pack_gated(weight, vector, gate)
        result = kernel(x)
        expected = activation(exact[:, :size]) * exact[:, size:]
        tolerance = 1e-5 if dtype == FP32 else 2**-7
        assert torch.allclose(
            result.float(),
            expected,
            rtol=tolerance,
            atol=tolerance * expected.abs().max().item() / 100,
        )
        for rows in (1, 5, 12, 13, 48):
            assert torch.equal(kernel(x[-rows:]), result[-rows:])


@each_level
def test_the_longest_sum_fits(level: str) -> None:
    k = 130_001  # odd: not rotated
    weight = w8a8_int8_cpu.create(FP32, level=level).pack(torch.ones(2, k), None)
    assert weight(torch.ones(1, k)).tolist() == [[pytest.approx(k)] * 2]
    assert weight(-torch.ones(1, k)).tolist() == [[pytest.approx(-k)] * 2]


def test_the_number_of_threads_changes_nothing() -> None:
    kernel, _ = packed(576, 192, BF16, None)
    x = activations(300, 192, BF16)
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(kernel(x))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_rotation_by_hand() -> None:
    assert [block_size(k) for k in (1, 3, 6, 36, 96, 576, 1024)] == [1, 1, 2, 4, 32, 64, 64]
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 10.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    assert rotate(x).tolist() == [
        [10.0, -2.0, -4.0, 0.0, 10.0, 10.0, 10.0, 10.0, 1.0, -1.0, -1.0, 1.0]
    ]
    assert torch.equal(rotate(x[:, :3]), x[:, :3])
    numbers = torch.randn(5, 192, dtype=torch.float64)
    assert torch.allclose(rotate(numbers) @ rotate(numbers).T, 64 * numbers @ numbers.T)


def test_an_outlier_costs_its_row_little() -> None:
    """The activations look like those of a model, in which the largest of 576 is often twenty times
    the root mean square."""
    torch.manual_seed(0)
    x, weight = torch.randn(40, 576), torch.randn(64, 576)
    x[:, 100] = 20
    error = w8a8_int8.create(FP32).pack(weight, None)(x) - x @ weight.T
    assert error.pow(2).mean().sqrt() < 0.012 * (x @ weight.T).pow(2).mean().sqrt()


def build(folder: Path, **options: object) -> ModelRunner:
    spec = read_spec(folder)
    return build_runner(
        EngineConfig(str(folder), spec, num_threads=1, quantization="w8a8_int8", **options)
    )


@pytest.mark.parametrize("tied", [False, True])
def test_layers_and_head_of_a_model_are_rounded_and_its_embedding_is_not(
    tmp_path: Path, tied: bool
) -> None:
    folder = write_tiny_llama(tmp_path, tie_word_embeddings=tied)
    runner = build(folder, dtype="bfloat16")
    plain = build_runner(
        EngineConfig(str(folder), read_spec(folder), num_threads=1, quantization="unquant")
    )
    x = torch.randn(3, 48).to(BF16)
    assert torch.equal(
        runner.model.model.embed_tokens.weight, plain.model.model.embed_tokens.weight
    )
    for name in ("model.layers.1.self_attn.qkv_proj", "lm_head"):
        one, other = (
            built.model.get_submodule(name).packed(x).float() for built in (runner, plain)
        )
        assert not torch.equal(one, other)
        assert torch.allclose(one, other, atol=0.02 * other.abs().max().item())


def test_without_a_compiler_the_reference_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_llama(tmp_path)
    monkeypatch.setattr(w8a8_int8_cpu, "load", refuse)
    runner = build(folder, dtype="bfloat16")
    assert runner.report.linear == "w8a8_int8_ref"
    fallback = Fallback("linear layers uses w8a8_int8_ref", "w8a8_int8_cpu: no compiler")
    assert fallback in runner.report.fallbacks
    monkeypatch.undo()
    x = torch.randn(3, 48).to(BF16)
    one, other = (
        built.model.model.layers[1].self_attn.qkv_proj.packed(x)
        for built in (runner, build(folder, dtype="bfloat16"))
    )
    assert torch.equal(one, other)


def refuse(level: str | None) -> None:
    raise KernelsUnavailable("no compiler")


def test_greedy_answers_depend_neither_on_the_batch_nor_on_replay(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, seed=4)
    prompts = {
        slot: np.random.default_rng(slot).integers(3, 131, 1 + 2 * slot).tolist()
        for slot in range(12)
    }

    def answers(
        runner: ModelRunner, prompts: dict[int, list[int]], **how: int
    ) -> dict[int, list[int]]:
        runner.allocate(num_pages=12 * 12, max_slots=12, context_len=48)
        return Driver(InprocExecutor(runner), page_size=4, pages_per_slot=12).generate(
            prompts, 12, **how
        )

    replayed, eager = (
        build(folder, dtype="bfloat16", page_size=4, capture=capture) for capture in (True, False)
    )
    together = answers(replayed, prompts, chunk=5)
    assert not replayed.why_eager
    assert answers(eager, prompts) == together
    assert {slot: answers(eager, {slot: ids})[slot] for slot, ids in prompts.items()} == together


def test_dummy_weights_take_the_bytes_that_are_planned(tmp_path: Path) -> None:
    """The weights have whole panels and tiles, so that nothing is filled up."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 128,
    }
    folder = write_tiny_llama(tmp_path, tie_word_embeddings=True, **shape)
    runner = build(folder, load_format="dummy")
    assert runner.report.weight_bytes == weight_bytes(runner.spec, 2, head_copied=True, rounded=1)


def test_a_model_of_transformers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            "--quantization w8a8_int8 needs a model of Setpoint's own; LlamaForCausalLM runs on"
            " transformers"
        ),
    ):
        build(write_tiny_llama(tmp_path), model_impl="transformers")
