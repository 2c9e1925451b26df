"""Products of a GGUF's blocks with few rows of 8 bits (``--quantization blocks_int8``): equal to those
of a reference in numpy at every level, for any number of rows below 24 and of threads, and close to
those in bf16. test_rotated_blocks.py has many rows."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from test_gguf_blocks import convert, kinds_kept, logits_of, quantised, row_of, runner_of

from setpoint.core.errors import ConfigError
from setpoint.core.model import BLOCK_KINDS, INT8_KINDS
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels.cpu import ops as cpu_ops
from setpoint.engine.kernels.ops import SILU
from setpoint.engine.quant import blocks as block_linear
from setpoint.engine.quant import grouped
from setpoint.engine.quant.linear_method import GgufWeight, choose_blocks
from setpoint_testing import tiny_gguf
from setpoint_testing.cpu_levels import each_level
from setpoint_testing.plans import Driver

BF16 = torch.bfloat16
KINDS = sorted(INT8_KINDS)
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 23)
F32 = np.float32


def rounded(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """fp32 rows [R, K] -> codes [R, G, runs, 16], steps [R, G, runs], scales [R, G]: of a group
    (256 neighbours for K-quants, else 32) the scale is its largest magnitude / 127 / 15, and the step
    of a run of 16 the least with which 127 of them reach the largest magnitude of the run."""
    group = BLOCK_KINDS[kind].num_values
    most_steps = F32(15)
    x = x.reshape(len(x), -1, group // 16, 16)
    tops = np.abs(x).max(3)
    top = np.where(tops.max(2) < 1e-30, F32(0), tops.max(2))
    tops *= top[..., None] > 0
    scales = top / (F32(127) * most_steps)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps_of = np.where(top > 0, most_steps / top, F32(0))
        steps = np.minimum(np.ceil(tops * steps_of[..., None]), most_steps)
        inverse = np.where(steps > 0, F32(1) / (steps * scales[..., None]), F32(0))
    codes = np.rint(x * inverse[..., None])
    assert codes.dtype == scales.dtype == F32
    assert np.abs(codes).max() <= 127
    return codes.astype(np.int64), steps.astype(np.int64), scales


def parts(raw: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Raw rows -> in fp32 [N, G] the number of the scale and that of the minimum, and as integers
    what they are multiplied by: of each value [N, G, runs, 16], and of each run [N, G, runs]. The
    oracle is the gguf package, which gets numbers of 1 and 0."""
    block = BLOCK_KINDS[kind]
    raw = raw.reshape(len(raw), -1, block.num_bytes)
    numbers, factors = [], []
    for i, at in enumerate((*block.scales, None)[:2]):
        chosen = raw.copy()
        for j, each in enumerate(block.scales):
            chosen[..., each : each + 2] = np.array([i == j], np.float16).view(np.uint8)
        values = gguf.dequantize(chosen.reshape(len(raw), -1), Kind[kind])
        factors.append(values.astype(np.int64).reshape(*raw.shape[:2], -1, 16))
        own = raw[..., at : at + 2].copy().view(np.float16)[..., 0] if at is not None else 0
        numbers.append(np.zeros(raw.shape[:2], F32) + F32(1) * own)
    return numbers[0], numbers[1], factors[0], factors[1][..., 0]


def reference(x: torch.Tensor, blocks: GgufWeight) -> torch.Tensor:
    """The product by the definition: each group is summed in integers, then the groups one after
    another in fp32."""
    codes, steps, scales = rounded(x.float().numpy(), blocks.kind)
    d, low, weight, least = parts(blocks.rows.numpy(), blocks.kind)
    total = np.einsum("rgbk,rgb,ngbk->rng", codes, steps, weight)
    minimum = np.einsum("rgb,rgb,ngb->rng", codes.sum(3), steps, least)
    assert np.abs(total).max() < 2**31
    sums = np.zeros(total.shape[:2], F32)
    for g in range(total.shape[2]):
        sums = sums + (d[:, g] * scales[:, g, None]) * total[..., g].astype(F32)
        if len(BLOCK_KINDS[blocks.kind].scales) > 1:
            sums = sums + (low[:, g] * scales[:, g, None]) * minimum[..., g].astype(F32)
    assert sums.dtype == F32
    return torch.from_numpy(sums).to(BF16)


def activations(rows: int, k: int) -> torch.Tensor:
    """Rows with outliers, blocks of zeros, subnormal numbers, and one row of zeros."""
    x = torch.randn(rows, k)
    x[:, 5] *= 40
    x[:, 32:64] = 0
    x[0, :32] *= 1e-3
    if rows > 2:
        x[2] = 0
        x[1] *= 1e-38
    return x.to(BF16)


@each_level
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "num_blocks"), [(1, 2), (33, 3), (96, 19)])
def test_a_product_is_that_of_the_reference(
    columns: int, num_blocks: int, kind: str, level: str
) -> None:
    torch.manual_seed(columns)
    k = max(row_of(kind, num_blocks), 64)
    blocks, weight = quantised(kind, columns, k)
    x = activations(max(ROWS), k)
    ours = block_linear.create(BF16, level=level, rounded=True).pack(blocks, None)
    expected = reference(x, blocks)
    for rows in ROWS:
        assert torch.equal(ours(x[:rows]), expected[:rows]), rows
        assert torch.equal(ours(x[-rows:]), expected[-rows:]), rows
    assert ours.num_bytes == -(-columns // 32) * 32 * k // BLOCK_KINDS[kind].num_values * (
        BLOCK_KINDS[kind].held_bytes
    )
    exact = x.double() @ weight.double().T
    error = (expected.double() - exact)[3:]
    assert error.norm() <= 0.02 * x[3:].double().norm() * weight.double().norm() / columns**0.5


@each_level
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_the_largest_sums_of_a_group_fit(kind: str, level: str) -> None:
    block = BLOCK_KINDS[kind]
    for byte in (0, 0x80, 0xFF):
        raw = np.full((32, block.num_bytes), 0xFF if kind == "Q4_K" else 0, np.uint8)
        if kind == "Q6_K":
            raw[:, 192:208] = byte
        for at in block.scales:
            raw[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
        blocks, x = GgufWeight(kind, torch.from_numpy(raw)), torch.full((9, 256), -3.0).to(BF16)
        ours = block_linear.create(BF16, level=level, rounded=True).pack(blocks, None)
        for each in (x, -x):
            assert torch.equal(ours(each), reference(each, blocks))


@each_level
@pytest.mark.parametrize("kind", KINDS)
def test_gate_bias_and_stack_see_the_same_sums(kind: str, level: str) -> None:
    """A gated product is that of its two halves; a bias is added to the sum in fp32."""
    k = row_of(kind, 3)
    method = block_linear.create(BF16, level=level, rounded=True)
    blocks, _ = quantised(kind, 70, k)
    x, bias = activations(20, k), torch.randn(70).to(BF16)
    gated, again = (method.pack_gated(blocks, bias, SILU) for _ in range(2))
    for rows in (1, 3, 8, 9, 20):
        assert torch.equal(gated(x[:rows]), again(x)[:rows])
    halves = (method.pack(blocks, bias)(x)).float()
    expected = torch.nn.functional.silu(halves[:, :35]) * halves[:, 35:]
    torch.testing.assert_close(gated(x).float(), expected, rtol=0.05, atol=0.05)
    other, _ = quantised("Q8_0", 33, k, seed=2)
    stack = method.pack_stack([blocks, other], None)(x)
    assert torch.equal(stack[:, :70], method.pack(blocks, None)(x))
    assert torch.equal(stack[:, 70:], method.pack(other, None)(x))


@each_level
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_still_those_of_the_weight(kind: str, level: str) -> None:
    blocks, weight = quantised(kind, 70, row_of(kind, 3))
    ids = torch.randint(0, 70, (200,), dtype=torch.int32)
    packed = block_linear.create(BF16, level=level, rounded=True).pack(blocks, None)
    # As integers, so that zeros have their signs, too.
    assert torch.equal(packed.rows(ids, 1.0).view(torch.int16), weight[ids].view(torch.int16))
    scaled = cpu_ops.create(BF16, level=level).embedding(ids, weight, 73.3)
    assert torch.equal(packed.rows(ids, 73.3), scaled)


@each_level
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
@pytest.mark.parametrize(("num_rows", "other"), [(12, 7), (40, 37)], ids=["few", "many"])
def test_what_is_not_finite_spoils_its_own_row_only(
    num_rows: int, other: int, kind: str, level: str
) -> None:
    """many: the products of decision 0082."""
    k = row_of(kind, 2)
    blocks, _ = quantised(kind, 40, k)
    ours = block_linear.create(BF16, level=level, rounded=True).pack(blocks, None)
    x = torch.randn(num_rows, k).to(BF16)
    expected = ours(x)
    x[3, k - 1], x[other, 0] = float("nan"), float("inf")
    found = ours(x)
    assert found[[3, other]].isnan().all()
    rest = [row for row in range(num_rows) if row not in (3, other)]
    assert torch.equal(found[rest], expected[rest])


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_experts_and_threads_change_no_bit(kind: str) -> None:
    before, k = torch.get_num_threads(), row_of(kind, 2)
    method = block_linear.create(BF16, rounded=True)
    packed = [method.pack(quantised(kind, 64, k, seed)[0], None) for seed in range(4)]
    x, ids = torch.randn(11, k).to(BF16), torch.randint(0, 4, (11, 2), dtype=torch.int32)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found = grouped.group(packed)(x, ids).view(11, 2, -1)
            for row in range(11):
                for j in range(2):
                    alone = packed[int(ids[row, j])](x[row : row + 1])[0]
                    assert torch.equal(found[row, j], alone)
    finally:
        torch.set_num_threads(before)


def k_quants(tmp_path: Path, more: Kind = Kind.Q6_K) -> Path:
    """A tiny model with the blocks of a Q4_K_M. more: those of the matrices that have more bits."""
    model = tiny_gguf.TinyLlama(hidden_size=256, intermediate_size=512, tie=True)
    six, raw = ("token_embd.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight"), {}
    for name, tensor in tiny_gguf.gguf_tensors(model, model.weights()).items():
        if tensor.ndim == 2:
            kind = more if name in six else Kind.Q4_K
            raw[name] = (quantised(kind.name, *tensor.shape, size=1e-3)[0].rows.numpy(), kind)
    return convert(tmp_path, model=model, raw=raw)


def test_a_model_is_close_to_that_in_bf16_and_knows_nothing_of_a_batch_of_few_rows(
    tmp_path: Path,
) -> None:
    folder = k_quants(tmp_path)
    ours, wide = runner_of(folder, "blocks_int8"), runner_of(folder, "unquant")
    assert kinds_kept(ours) == {"Q4_K": 6, "Q6_K": 2, "Q4_K+Q6_K": 1}
    assert "in the file's own blocks, multiplied by activations of 8 bits" in ours.report.weights
    assert not ours.why_eager
    ids = np.random.default_rng(0).integers(3, 300, 33).tolist()
    for length in (9, 33):  # few and many rows
        logits, expected = logits_of(ours, ids[:length]), logits_of(wide, ids[:length])
        assert not torch.equal(logits, expected)
        assert (logits - expected).norm() < 0.1 * expected.norm()
    prompts = {slot: ids[slot : slot + 9] for slot in range(3)}
    together = Driver(InprocExecutor(ours), 4, 16).generate(prompts, 12, chunk=4)
    for slot, prompt in prompts.items():
        alone = runner_of(folder, "blocks_int8")
        assert Driver(InprocExecutor(alone), 4, 16).generate({slot: prompt}, 12) == {
            slot: together[slot]
        }


def test_the_kinds_that_stay_in_bfloat16_are_named(tmp_path: Path) -> None:
    """Also where they are one part of a matrix: v in Q5_K below q and k in Q4_K."""
    weights = runner_of(k_quants(tmp_path, Kind.Q5_K), "blocks_int8").report.weights
    assert weights.startswith(
        "6 Q4_K and 1 Q4_K+Q5_K (Q5_K in bfloat16) and 2 Q5_K (in bfloat16) matrices"
    )


def test_it_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match="blocks_int8 cannot be used here: blocks are multiplied"):
        choose_blocks(torch.device("cpu"), torch.float32, "blocks_int8")
    with pytest.raises(ConfigError, match="does not run on meta"):
        choose_blocks(torch.device("meta"), BF16, "blocks_int8")
    assert choose_blocks(torch.device("cpu"), BF16, "w8a8_int8") is None
