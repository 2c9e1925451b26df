"""Products with experts in Triton, interpreted, against float64."""

from __future__ import annotations

import pytest
import torch

from setpoint_testing import interpreted_triton as interpreted_triton
from setpoint_testing.operation_cases import BF16, FP32

# isort: split
from setpoint.engine.kernels.triton import grouped
from setpoint.engine.kernels.triton.grouped import Tile, multiply_pairs

FP16 = torch.float16
EXPERTS = 5
CHOICES = {
    "one row": torch.tensor([[3, 0]]),
    "few rows": torch.tensor([[3, 0], [0, 3], [4, 1]]),
    "all on one expert": torch.full((40, 1), 2),
    "many rows": torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(60)]),
}
ROUNDING = {FP32: 2e-6, BF16: 2**-8, FP16: 2**-11}


def expected(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, biases: torch.Tensor | None
) -> torch.Tensor:
    rows = x.double().repeat_interleave(ids.numel() // len(x), 0)
    experts = ids.flatten().long()
    found = torch.einsum("pk,pnk->pn", rows, weights.double()[experts])
    return found if biases is None else found + biases.double()[experts]


def compare(found: torch.Tensor, wanted: torch.Tensor) -> None:
    limit = ROUNDING[found.dtype]
    worst = (found.double() - wanted).abs() / (wanted.abs() + wanted.abs().mean())
    assert worst.max() <= limit, worst.max()


@pytest.mark.cases(5)
@pytest.mark.parametrize("sizes", [(32, 16), (48, 100), (256, 130), (320, 72)], ids=str)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_products_match_float64(dtype: torch.dtype, choice: str, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    (depth, columns), ids = sizes, CHOICES[choice].int()
    weights = torch.randn(EXPERTS, columns, depth).to(dtype)
    for rows, biases in (
        (len(ids), None),
        (ids.numel(), torch.randn(EXPERTS, columns).to(dtype)),
    ):
        x = torch.randn(rows, depth).to(dtype)
        found = multiply_pairs(x, weights, ids, dtype=dtype, biases=biases)
        compare(found, expected(x, weights, ids, biases))


@pytest.mark.parametrize("tile", [Tile(16, 64, 32, 3), Tile(64, 128, 32, 3)], ids=str)
def test_a_pair_has_the_same_bits_beside_any_others(
    tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside rows that only pad a step, and on a rank that has some of the experts."""
    monkeypatch.setattr(grouped, "tile_of", lambda *_: tile)
    torch.manual_seed(1)
    x, weights = torch.randn(70, 72).to(BF16), torch.randn(EXPERTS, 40, 72).to(BF16)
    ids = torch.randint(0, EXPERTS, (70, 2), dtype=torch.int32)
    found = multiply_pairs(x, weights, ids, dtype=BF16)
    compare(found, expected(x, weights, ids, None))
    order = torch.randperm(70)
    shuffled = multiply_pairs(x[order], weights, ids[order], dtype=BF16)
    assert torch.equal(shuffled.view(70, 2, -1), found.view(70, 2, -1)[order])
    x[30:] = torch.nan
    ids[30:] = 3
    padded = multiply_pairs(x, weights, ids, dtype=BF16)
    assert torch.equal(padded[:60], found[:60])
    some = multiply_pairs(x, weights[2:4].contiguous(), ids, dtype=BF16, first=2)
    is_here = ((ids == 2) | (ids == 3)).flatten()
    assert torch.equal(some[is_here][:9], padded[is_here][:9])


def test_pairs_are_cut_into_as_many_tiles_as_they_could_need() -> None:
    """Every expert has one row more than fills its tiles."""
    for height in (16, 64):
        counts = [height + 1] * 3 + [1]
        ids = torch.cat([torch.full((n, 1), e) for e, n in enumerate(counts)]).int()
        ids = ids[torch.randperm(len(ids))].contiguous()
        weights = torch.eye(4)[:, :, None].expand(4, 4, 16).contiguous()
        pairs = ids if height == 16 else ids.repeat(3, 1)
        assert grouped.tile_of(len(pairs), 4, 4).height == height
        found = multiply_pairs(torch.ones(len(pairs), 16), weights, pairs, dtype=FP32)
        assert torch.equal(found.argmax(1), pairs[:, 0].long())
        assert (found.sum(1) == 16).all()


def test_all_rows_with_one_weight() -> None:
    torch.manual_seed(2)
    x, weight, bias = torch.randn(21, 96), torch.randn(1, 50, 96), torch.randn(1, 50)
    found = multiply_pairs(x, weight, None, dtype=FP32, biases=bias)
    compare(found, x.double() @ weight[0].double().T + bias.double())
