"""The C++ kernels against the reference implementations in float64, at every instruction-set level
this machine has."""

from __future__ import annotations

import itertools

import pytest
import torch

from setpoint.engine.kernels.cpu import ops as cpu_ops
from setpoint.engine.kernels.ops import GELU_TANH, SILU, GateActivation
from setpoint.engine.kernels.ref import RefOps
from setpoint.engine.quant import cpu_linear as cpu_linear
from setpoint_testing.cpu_levels import each_level
from setpoint_testing.operation_cases import (
    BF16,
    FP32,
    ROTARIES,
    ROWS_COLUMNS,
    VOCABULARIES,
    close,
    with_ties_and_nan,
)

CLAMPED = GateActivation("clamped_swiglu_mul", (1.702, 1.5))


@pytest.fixture
def threads():
    """Sets torch's number of threads; restored afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_norms_and_activation_match_reference(dtype: torch.dtype, level: str):
    ops, ref = cpu_ops.create(dtype, level=level), RefOps()
    for rows, columns in ROWS_COLUMNS:
        torch.manual_seed(rows * columns)
        x, residual = (torch.randn(rows, columns).mul(3).to(dtype) for _ in range(2))
        weight = torch.rand(columns).add(0.5).to(dtype)
        before = x.clone()
        assert close(ops.rms_norm(x, weight, 1e-5), ref.rms_norm(x, weight, 1e-5), dtype)
        assert torch.equal(x, before)
        expected = ref.add_rms_norm(x, residual, weight, 1e-5)
        normed, summed = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
        assert torch.equal(summed, expected[1])
        assert close(normed, expected[0], dtype)
        assert close(ops.rms_norm(x, weight, 1e-5, 1.0), ref.rms_norm(x, weight, 1e-5, 1.0), dtype)
        assert close(
            ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, 1.0)[0],
            ref.rms_norm(summed, weight, 1e-5, 1.0),
            dtype,
        )
        heads = torch.randn(rows, 5, columns).to(dtype)[
            :, 1:4
        ]  # strided, as they come from a projection
        assert close(ops.rms_norm(heads, weight, 1e-5), ref.rms_norm(heads, weight, 1e-5), dtype)
        ids = torch.randint(0, rows, (9,), dtype=torch.int32)
        for scale in (1.0, columns**0.5):
            assert torch.equal(ops.embedding(ids, x, scale), ref.embedding(ids, x, scale))
        gate_up = torch.randn(rows, 2 * columns).mul(4).to(dtype)
        gate_up[0, :4] = torch.tensor([0.0, 200.0, -200.0, -90.0]).to(dtype)
        assert close(ops.silu_mul(gate_up), ref.silu_mul(gate_up), dtype)
        clamped = (1.702, 7.0)
        assert close(
            ops.clamped_swiglu_mul(gate_up, *clamped),
            ref.clamped_swiglu_mul(gate_up, *clamped),
            dtype,
        )
        logits = gate_up.clone()
        logits[1 % rows, :2] = torch.tensor([torch.inf, torch.nan]).to(dtype)
        capped = ops.soft_cap(logits.clone(), 30.0)
        assert torch.allclose(
            capped.double(),
            ref.soft_cap(logits.double(), 30.0),
            rtol=2**-8 if dtype == BF16 else 1e-6,
            equal_nan=True,
        )
        assert all(
            torch.equal(ops.soft_cap(row[None].clone(), 30.0)[0].nan_to_num(), one.nan_to_num())
            for row, one in zip(logits, capped, strict=True)
        )
        # In fp32 torch's own 1 + tanh loses the digits of small results.
        assert close(ops.gelu_tanh_mul(gate_up), ref.gelu_tanh_mul(gate_up.double()), dtype)


@each_level
def test_tokens_are_placed_and_chosen_as_the_reference_does(level: str):
    ops, ref, torch_ids = cpu_ops.create(BF16, level=level), RefOps(), {"dtype": torch.int32}
    known, pages = (
        torch.randint(0, 999, (9, 40), **torch_ids),
        torch.randint(0, 99, (9, 13), **torch_ids),
    )
    slots, counts, kv_lens = (
        torch.tensor(values, **torch_ids) for values in ((4, 0, 8), (1, 6, 39), (17, 6, 39))
    )
    cu_q = torch.cat((torch.zeros(1, **torch_ids), counts.cumsum(0).int()))
    for ours, theirs in zip(
        *(each.place_tokens(slots, cu_q, kv_lens, known, pages, 3, 46) for each in (ops, ref)),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    for columns, dtype in itertools.product(VOCABULARIES, (BF16, FP32)):
        logits = with_ties_and_nan(columns, dtype)
        assert torch.equal(ops.best_tokens(logits), ref.best_tokens(logits))
        words = torch.randint(-(1 << 31), 1 << 31, (3, columns // 32 + 2)).int()
        words[1] = torch.tensor([0, -1])[torch.randint(0, 2, (columns // 32 + 2,))]
        which, ours, theirs = torch.tensor([11, 0, 7]), logits.clone(), logits.clone()
        ops.mask_tokens(ours, which, words)
        ref.mask_tokens(theirs, which, words)
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kv_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary_dim", "tokens"), ROTARIES)
def test_rope_and_store_matches_reference(
    heads, kv_heads, head_dim, rotary_dim, tokens, dtype, kv_dtype, level
):
    torch.manual_seed(head_dim)
    angles = torch.rand(1000, rotary_dim // 2) * 6.3
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions, kv_index = torch.randint(0, 1000, (tokens,)), torch.randperm(16 * 40)[:tokens]
    merged = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    results = []
    for ops in (cpu_ops.create(dtype, level=level), RefOps()):
        q, k, v = merged.clone().split((heads, kv_heads, kv_heads), dim=1)
        k_cache, v_cache = (
            torch.zeros(40, 16, kv_heads, head_dim, dtype=kv_dtype) for _ in range(2)
        )
        results.append(
            (
                ops.rope_and_store(q, k, v, cos_sin, positions, k_cache, v_cache, kv_index),
                k_cache,
                v_cache,
            )
        )
    (q, k_cache, _), (expected_q, expected_k_cache, _) = results
    assert close(q, expected_q, dtype)
    assert torch.equal(q[..., rotary_dim:], merged[:, :heads, rotary_dim:])
    assert close(k_cache, expected_k_cache, BF16 if BF16 in (dtype, kv_dtype) else FP32)
    assert torch.equal(results[0][2], results[1][2])


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("columns", "k"), [(96, 64), (70, 36), (1, 2), (33, 576)])
def test_linear_matches_torch_and_a_row_knows_no_batch(columns, k, dtype, level):
    torch.manual_seed(columns)
    weight, bias = torch.randn(columns, k).to(dtype), torch.randn(columns).to(dtype)
    x = torch.randn(123, k).to(dtype)
    for b in (None, bias):
        linear = cpu_linear.create(dtype, level=level).pack(weight, b)
        result = linear(x)
        exact = torch.nn.functional.linear(
            x.double(), weight.double(), None if b is None else b.double()
        )
        assert torch.allclose(
            result.double(), exact, rtol=2**-8 if dtype == BF16 else 2e-6, atol=2e-6 * k**0.5
        )
        for rows in (*range(1, 27), 48, 49, 122):
            assert torch.equal(linear(x[-rows:]), result[-rows:])
    assert linear.num_bytes >= weight.nbytes + bias.nbytes


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("gate", [SILU, GELU_TANH, CLAMPED], ids=str)
@pytest.mark.parametrize(("size", "k"), [(48, 64), (70, 36), (1, 2)])
def test_a_gated_product_matches_torch_and_a_row_knows_no_batch(size, k, gate, dtype, level):
    torch.manual_seed(size)
    weight, bias = torch.randn(2 * size, k).div(k**0.5).to(dtype), torch.randn(2 * size).to(dtype)
    x = torch.randn(61, k).to(dtype)
    for b in (None, bias):
        linear = cpu_linear.create(dtype, level=level).pack_gated(weight, b, gate)
        result = linear(x)
        products = torch.nn.functional.linear(
            x.double(), weight.double(), None if b is None else b.double()
        )
        exact = getattr(RefOps(), gate.operation)(products, *gate.arguments)
        assert torch.allclose(
            result.double(), exact, rtol=2**-7 if dtype == BF16 else 4e-6, atol=1e-5
        )
        for rows in (1, 5, 12, 13, 48):
            assert torch.equal(linear(x[-rows:]), result[-rows:])


def test_number_of_threads_does_not_change_a_product(threads):
    weight, x = torch.randn(576, 192), torch.randn(60, 192)
    linear = cpu_linear.create(FP32).pack(weight, None)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(linear(x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
