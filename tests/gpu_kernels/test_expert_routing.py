"""Routes to experts and what comes back, in Triton, interpreted, against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from setpoint.core.expert_placement import places
from setpoint.engine.kernels.ops import SCORINGS, Routing
from setpoint.engine.kernels.ref import RefOps
from setpoint_testing import interpreted_triton as interpreted_triton
from setpoint_testing.operation_cases import (
    BF16,
    FP32,
    GROUPED_ROUTES,
    ROUTES,
    check_groups_of_equal_scores,
)

# isort: split
from setpoint.engine.kernels.triton.ops import create

REF, OPS = RefOps(), create(BF16)
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)


def compare(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> torch.Tensor:
    """Compare with the reference, and each row with the row alone. -> ids"""
    ids, weights = OPS.route(logits, routing, correction)
    expected_ids, expected = REF.route(logits, routing, correction)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    assert torch.allclose(weights, expected, rtol=2e-6, atol=1e-9)
    single = OPS.route(logits[-1:].clone(), routing, correction)
    assert torch.equal(single[0][0], ids[-1])
    assert torch.equal(single[1][0], weights[-1])
    return ids


@pytest.mark.cases(6)
@pytest.mark.parametrize(("experts", "count"), ROUTES)
@pytest.mark.parametrize("scoring", SCORINGS)
@DTYPES
def test_routes_match_the_reference(
    dtype: torch.dtype, scoring: str, experts: int, count: int
) -> None:
    for rows, normalise in itertools.product((1, 13), (False, True)):
        torch.manual_seed(rows * experts)
        logits = torch.randn(rows, experts).mul(3).to(dtype)
        compare(logits, Routing(count, scoring, normalise))


@pytest.mark.cases(3)
@pytest.mark.parametrize("sizes", GROUPED_ROUTES, ids=str)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("best", [1, 2])
def test_groups_and_corrections_match_the_reference(
    best: int, scoring: str, sizes: tuple[int, int, int, int]
) -> None:
    experts, count, groups, opened = sizes
    for rows, dtype in ((1, FP32), (9, BF16)):
        torch.manual_seed(rows * experts)
        logits = torch.randn(rows, experts).mul(3).to(dtype)
        logits[-1, :2] = -120.0  # sigmoids of zero
        routing = Routing(count, scoring, best > 1, 2.5, groups, opened, best)
        for correction in (None, torch.randn(experts)):
            ids = compare(logits, routing, correction)
            size = experts // groups
            assert all(len(set((row // size).tolist())) <= opened for row in ids)


def test_groups_of_equal_scores_are_taken_in_order() -> None:
    check_groups_of_equal_scores(OPS)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_ties_go_to_the_first_and_nan_stays_in_its_row(scoring: str) -> None:
    logits = torch.zeros(5, 6)
    logits[1, 4], logits[2, 2], logits[3, 1], logits[4] = 1.0, torch.nan, torch.inf, -torch.inf
    for groups, normalise in itertools.product((1, 2), (True, False)):
        routing = Routing(3, scoring, normalise, num_groups=groups, num_open=groups)
        ids, weights = OPS.route(logits, routing)
        assert ids[:2].tolist() == [[0, 1, 2], [4, 0, 1]]
        assert torch.allclose(weights[:2], REF.route(logits, routing)[1][:2])
        assert weights[2].isnan().all()
        assert ((ids >= 0) & (ids < 6)).all()
        assert all(len(set(row)) == 3 for row in ids.tolist())


@pytest.mark.cases(4)
@pytest.mark.parametrize("columns", [16, 100, 576, 1536])
@pytest.mark.parametrize("count", [1, 2, 8])
@DTYPES
def test_combinations_match_the_reference(dtype: torch.dtype, count: int, columns: int) -> None:
    for rows in (1, 3, 19):
        torch.manual_seed(rows * count * columns)
        parts, weights = torch.randn(rows * count, columns).to(dtype), torch.rand(rows, count)
        shared, gate = torch.randn(rows, columns).to(dtype), torch.randn(rows, 1).to(dtype)
        for more in ((), (shared,), (shared, gate)):
            found, expected = OPS.combine(parts, weights, *more), REF.combine(parts, weights, *more)
            tolerance = 2e-6 if dtype == FP32 else 2**-7
            assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
            last = [each[-1:] for each in more]
            assert torch.equal(OPS.combine(parts[-count:], weights[-1:], *last)[0], found[-1])


def test_parts_are_added_in_order() -> None:
    parts = torch.tensor([1e8, 1.0, -1e8, 0.5]).repeat(16, 1).T.contiguous()
    assert OPS.combine(parts, torch.ones(1, 4)).tolist() == [[0.5] * 16]


def test_tokens_of_slots_are_counted() -> None:
    experts, chosen = 6, 3
    table = torch.from_numpy(places((3, 0, 1, 2, 5, 4, 3, 3, 0), experts))
    for rows in (1, 167):
        torch.manual_seed(rows)
        ids = torch.stack([torch.randperm(experts)[:chosen] for _ in range(rows)]).int()
        positions = torch.randint(0, 1000, (rows,))
        cases = ((None, experts, positions), (None, experts, None), (table, 9, positions))
        for given, num_slots, known in cases:
            loads = [torch.full((num_slots,), 7) for _ in range(2)]
            found, expected = (
                each.place_experts(ids, load, known, given)
                for each, load in zip((OPS, REF), loads, strict=True)
            )
            assert found.dtype == torch.int32
            assert torch.equal(found, expected)
            assert torch.equal(*loads)
            with_padding = positions.clone()
            with_padding[0] = -1
            padded = OPS.place_experts(ids, loads[0], with_padding, given)
            assert ((padded >= 0) & (padded < num_slots)).all()
            assert loads[0].sum() - loads[1].sum() == (rows - 1) * chosen
