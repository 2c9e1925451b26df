"""Mixtures of experts: the kernels against the reference at every level, and a token's bits, which
depend on nothing but the token."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.expert_placement import places
from setpoint.engine.executor.build_runner import EngineConfig
from setpoint.engine.kernels.cpu import ops as cpu_ops
from setpoint.engine.kernels.ops import SCORINGS, SILU, GateActivation, Routing
from setpoint.engine.kernels.ref import RefOps
from setpoint.engine.quant import blocks, cpu_linear, plain, w8a8_int8_cpu
from setpoint.engine.quant.grouped import KernelExperts, LoopedExperts, StackedExperts, group
from setpoint.engine.quant.linear_method import GgufWeight, PackedWeight
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.cpu_levels import each_level
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.operation_cases import (
    BF16,
    FP32,
    GROUPED_ROUTES,
    ROUTES,
    check_groups_of_equal_scores,
)
from setpoint_testing.plans import Driver
from setpoint_testing.ranks import ranks

EXPERTS, K, COLUMNS = 5, 96, 80
CLAMPED = GateActivation("clamped_swiglu_mul", (1.702, 1.5))


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_routes_match_the_reference(
    dtype: torch.dtype, level: str, scoring: str, normalise: bool
) -> None:
    ops, ref = cpu_ops.create(dtype, level=level), RefOps()
    for rows, (experts, count) in itertools.product((1, 3, 67), ROUTES):
        torch.manual_seed(rows * experts)
        logits = torch.randn(rows, experts).mul(3).to(dtype)
        routing = Routing(count, scoring, normalise)
        ids, weights = ops.route(logits, routing)
        expected_ids, expected = ref.route(logits, routing)
        assert torch.equal(ids, expected_ids)
        assert torch.allclose(weights, expected, rtol=1e-6, atol=1e-9)


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("best", [1, 2])
def test_groups_and_corrections_match_the_reference(
    dtype: torch.dtype, level: str, scoring: str, best: int
) -> None:
    ops, ref = cpu_ops.create(dtype, level=level), RefOps()
    for rows, (experts, count, groups, opened) in itertools.product((1, 67), GROUPED_ROUTES):
        torch.manual_seed(rows * experts)
        logits = torch.randn(rows, experts).mul(3).to(dtype)
        logits[-1, :2] = -120.0  # sigmoids of zero
        routing = Routing(count, scoring, best > 1, 2.5, groups, opened, best)
        for correction in (None, torch.randn(experts)):
            ids, weights = ops.route(logits, routing, correction)
            expected_ids, expected = ref.route(logits, routing, correction)
            assert torch.equal(ids, expected_ids)
            assert torch.allclose(weights, expected, rtol=2e-6, atol=1e-9)
            size = experts // groups
            assert all(len(set((row // size).tolist())) <= opened for row in ids)


def test_groups_of_equal_scores_are_taken_in_order() -> None:
    for ops in (cpu_ops.create(FP32), RefOps()):
        check_groups_of_equal_scores(ops)


def test_a_softmax_over_the_chosen_is_transformers() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssTopKRouter

    torch.manual_seed(0)
    router = GptOssTopKRouter(
        GptOssConfig(hidden_size=16, num_local_experts=9, num_experts_per_tok=4)
    ).double()
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.bias)
    x = torch.randn(50, 16, dtype=torch.float64)
    logits, expected, expected_ids = router(x)
    ids, weights = RefOps().route(logits, Routing(4, "softmax_of_chosen"))
    assert torch.equal(ids, expected_ids.int())
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-15)


@each_level
@pytest.mark.parametrize("scoring", SCORINGS)
def test_ties_go_to_the_first_and_nan_stays_in_its_row(level: str, scoring: str) -> None:
    logits = torch.zeros(3, 6)
    logits[1, 4], logits[2, 2] = 1.0, float("nan")
    for ops in (cpu_ops.create(FP32, level=level), RefOps()):
        ids, weights = ops.route(logits, Routing(3, scoring, normalise=True))
        assert ids[:2].tolist() == [[0, 1, 2], [4, 0, 1]]
        assert torch.isfinite(weights[:2]).all()
        assert weights[2].isnan().all()
        assert ((ids >= 0) & (ids < 6)).all()


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_combinations_match_the_reference(dtype: torch.dtype, level: str) -> None:
    ops, ref = cpu_ops.create(dtype, level=level), RefOps()
    for rows, count, columns in itertools.product((1, 3, 67), (1, 2, 8), (16, 100, 576)):
        torch.manual_seed(rows * count * columns)
        parts, weights = torch.randn(rows * count, columns).to(dtype), torch.rand(rows, count)
        shared, gate = torch.randn(rows, columns).to(dtype), torch.randn(rows, 1).to(dtype)
        for more in ((), (shared,), (shared, gate)):
            found, expected = ops.combine(parts, weights, *more), ref.combine(parts, weights, *more)
            tolerance = 2e-6 if dtype == FP32 else 2**-7
            assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


@each_level
def test_tokens_of_slots_are_counted(level: str) -> None:
    experts, chosen = 6, 3
    table = torch.from_numpy(places((3, 0, 1, 2, 5, 4, 3, 3, 0), experts))
    for rows in (1, 67):
        torch.manual_seed(rows)
        ids = torch.stack([torch.randperm(experts)[:chosen] for _ in range(rows)]).int()
        positions = torch.randint(0, 1000, (rows,))
        cases = ((None, experts, positions), (None, experts, None), (table, 9, positions))
        for given, num_slots, known in cases:
            ops = (cpu_ops.create(FP32, level=level), RefOps())
            loads = [torch.full((num_slots,), 7) for _ in ops]
            found, expected = (
                each.place_experts(ids, load, known, given)
                for each, load in zip(ops, loads, strict=True)
            )
            assert torch.equal(found, expected)
            assert torch.equal(*loads)
            assert loads[0].sum() == 7 * num_slots + rows * chosen
            if given is not None:
                slots_of_3 = found[ids == 3].tolist()
                where = positions[(ids == 3).nonzero()[:, 0]].tolist()
                assert slots_of_3 == [(0, 6, 7)[position % 3] for position in where]


def packed(kind: str, level: str, seed: int, gate: GateActivation | None) -> PackedWeight:
    torch.manual_seed(seed)
    weight = torch.randn(2 * COLUMNS if gate else COLUMNS, K)
    if kind == "Q8_0":
        scales = torch.rand(len(weight), K // 32, 1).half()
        codes = torch.randint(-127, 128, (len(weight), K // 32, 32), dtype=torch.int8)
        raw = torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], dim=2)
        method = blocks.create(BF16, level=level)
        whole = GgufWeight(kind, raw.flatten(1))
        return method.pack_gated(whole, None, gate) if gate else method.pack(whole, None)
    weight = weight.to(FP32 if kind == "fp32" else BF16)
    module = w8a8_int8_cpu if kind == "int8" else cpu_linear
    method = module.create(weight.dtype, level=level)
    return method.pack_gated(weight, None, gate) if gate else method.pack(weight, None)


CHOICES = {
    "one row": torch.tensor([[3, 0]]),
    "few rows": torch.tensor([[3, 0], [0, 3], [4, 1]]),
    "all on one expert": torch.full((40, 1), 2),
    "many rows": torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(150)]),
}


@each_level
@pytest.mark.parametrize("kind", ["bf16", "fp32", "int8", "Q8_0"])
@pytest.mark.parametrize("gate", [None, SILU, CLAMPED], ids=str)
def test_each_row_is_the_product_with_its_expert(
    kind: str, level: str, gate: GateActivation | None
) -> None:
    weights = [packed(kind, level, seed, gate) for seed in range(EXPERTS)]
    grouped = group(weights)
    assert isinstance(grouped, KernelExperts)
    for ids in CHOICES.values():
        ids = ids.int()
        for per_row in (ids.shape[1], 1):
            rows = torch.randn(ids.numel() // per_row, K).to(FP32 if kind == "fp32" else BF16)
            found = grouped(rows, ids)
            for pair, expert in enumerate(ids.flatten().tolist()):
                alone = weights[expert](rows[pair // per_row, None])
                assert torch.equal(found[pair, None], alone), (pair, expert)
            # A rank with the experts from 2 on leaves the rows of the others alone.
            some = group(weights[2:], 2)(rows, ids)
            is_here = ids.flatten() >= 2
            assert torch.equal(some[is_here], found[is_here])


@pytest.mark.parametrize("kind", [LoopedExperts, StackedExperts])
def test_other_weights_on_torch(kind: type[LoopedExperts | StackedExperts]) -> None:
    weights = [plain.create(FP32).pack(torch.randn(COLUMNS, K), None) for _ in range(EXPERTS)]
    assert isinstance(group(weights), LoopedExperts)
    grouped = kind(weights)
    ids = CHOICES["many rows"].int()
    rows = torch.randn(len(ids), K)
    found = grouped(rows, ids).view(*ids.shape, COLUMNS)
    some = kind(weights[2:4], 2)(rows, ids).view(*ids.shape, COLUMNS)
    is_here = (ids >= 2) & (ids < 4)
    assert torch.allclose(some[is_here], found[is_here], atol=1e-5)
    for row, (token, chosen) in enumerate(zip(rows, ids.tolist(), strict=True)):
        for index, expert in enumerate(chosen):
            assert torch.allclose(found[row, index], weights[expert](token[None])[0], atol=1e-5)


MIXTURES = {
    golden.config["model_type"]: golden.config
    for golden in reversed(GOLDENS)
    if "num_experts_per_tok" in golden.config
}
"""Model type -> the first golden model of it."""


@pytest.mark.cases(9)
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("quantization", [None, "w8a8_int8"])
def test_tokens_do_not_depend_on_the_batch(
    tmp_path: Path, name: str, quantization: str | None
) -> None:
    folder = write_tiny(tmp_path, MIXTURES[name])
    config = EngineConfig(
        str(folder), read_spec(folder), page_size=4, num_threads=1, quantization=quantization
    )
    prompts = {
        slot: torch.randint(
            3, 131, (length,), generator=torch.Generator().manual_seed(slot)
        ).tolist()
        for slot, length in enumerate((37, 1, 16, 50))
    }
    rows = {"num_rows": 256, "max_slots": 8, "context_len": 128}
    with ranks(config, 1, **rows) as executor:
        groups = len(executor.executor.runner.pool.layout.groups)
        together = Driver(executor, 4, 32, groups).generate(prompts, 12)
    with ranks(config, 1, **rows) as executor:
        chunked = Driver(executor, 4, 32, groups).generate(prompts, 12, chunk=5)
    assert chunked == together
    for slot in (0, 2):
        with ranks(config, 1, **rows) as executor:
            assert (
                Driver(executor, 4, 32, groups).generate({slot: prompts[slot]}, 12)[slot]
                == together[slot]
            )
