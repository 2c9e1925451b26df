"""torch_ref, the definition of paged attention, against plain dense attention; and what may not
change its results."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from setpoint.engine.attention import torch_ref
from setpoint.engine.attention.attention_backend import (
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)
from setpoint_testing.attending import attend

HEADS, HEAD_DIM, CONTEXT = 4, 8, 64
ROWS = [(0, 1), (0, 17), (9, 1), (30, 1), (16, 16), (5, 30)]
"""(start, count) of each row; row i sits in slot 2 i."""
VARIANTS = {
    "plain": AttentionVariant(0.3),
    "softcap": AttentionVariant(0.8, softcap=1.5),
    "window1": AttentionVariant(0.3, window=1),
    "window8": AttentionVariant(0.3, window=8),
    "window31": AttentionVariant(0.3, window=31),
    "both": AttentionVariant(0.5, softcap=2.0, window=5),
    "sinks": AttentionVariant(0.3, sinks=torch.linspace(-3, 3, HEADS)),
    "all": AttentionVariant(0.5, softcap=2.0, window=5, sinks=torch.linspace(-3, 3, HEADS)),
}


def paged(
    page_size: int, kv_heads: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    """q, caches of random content (NaN on the dummy page and past each row's end), and the
    batch."""
    rng = torch.Generator().manual_seed(page_size)
    width = CONTEXT // page_size
    num_slots = 2 * len(ROWS)
    table = torch.randperm(num_slots * width, generator=rng).int().view(num_slots, width) + 1
    k, v = (
        torch.randn(
            num_slots * width + 1, page_size, kv_heads, HEAD_DIM, generator=rng, dtype=torch.float64
        ).to(dtype)
        for _ in "kv"
    )
    starts, counts = np.array(ROWS, np.int32).T
    ends = starts + counts
    for slot, end in zip(range(0, num_slots, 2), ends.tolist(), strict=True):
        for position in range(end, CONTEXT):
            k[table[slot, position // page_size], position % page_size] = torch.nan
            v[table[slot, position // page_size], position % page_size] = torch.nan
    k[0] = v[0] = torch.nan
    cu_q = np.append(0, counts.cumsum()).astype(np.int32)
    positions = torch.cat([torch.arange(start, start + count) for start, count in ROWS])
    slots = torch.arange(0, num_slots, 2, dtype=torch.int32)
    pages = table[slots.repeat_interleave(torch.tensor(counts)), positions // page_size].long()
    batch = AttentionBatch(
        positions=positions,
        kv_index=pages * page_size + positions % page_size,
        cu_q=torch.tensor(cu_q),
        cu_q_host=cu_q,
        kv_lens=torch.tensor(ends),
        kv_lens_host=ends,
        slots=slots,
        page_table=table,
    )
    q = torch.randn(len(positions), HEADS, HEAD_DIM, generator=rng, dtype=torch.float64).to(dtype)
    return q, k, v, batch


def backend(page_size: int, kv_heads: int, dtype: torch.dtype) -> torch_ref.TorchRefAttention:
    return torch_ref.create(
        AttentionShape(HEADS, kv_heads, HEAD_DIM, page_size, dtype, dtype, torch.device("cpu"))
    )


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: AttentionBatch,
    page_size: int,
    variant: AttentionVariant,
) -> torch.Tensor:
    """One token and head at a time, in float64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = HEADS // k.shape[2]
    for row, (start, count) in enumerate(ROWS):
        for at in range(count):
            token = int(batch.cu_q_host[row]) + at
            seen = [
                p
                for p in range(start + at + 1)
                if variant.window is None or p > start + at - variant.window
            ]
            places = [(int(batch.page_table[2 * row, p // page_size]), p % page_size) for p in seen]
            for head in range(HEADS):
                keys = torch.stack(
                    [k[page, offset, head // group].double() for page, offset in places]
                )
                values = torch.stack(
                    [v[page, offset, head // group].double() for page, offset in places]
                )
                scores = keys @ q[token, head].double() * variant.scale
                if variant.softcap is not None:
                    scores = torch.tanh(scores / variant.softcap) * variant.softcap
                if variant.sinks is not None:
                    scores = torch.cat((scores, variant.sinks[head, None].double()))
                out[token, head] = torch.softmax(scores, dim=0)[: len(seen)] @ values
    return out


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_equals_dense_attention(
    page_size: int, kv_heads: int, dtype: torch.dtype, atol: float
) -> None:
    q, k, v, batch = paged(page_size, kv_heads, dtype)
    out = attend(backend(page_size, kv_heads, dtype), q, k, v, batch, VARIANTS["plain"])
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), dense(q, k, v, batch, page_size, VARIANTS["plain"]), rtol=0, atol=atol
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_windows_soft_caps_and_sinks_equal_dense_attention(name: str) -> None:
    q, k, v, batch = paged(4, 2, torch.float64)
    out = attend(backend(4, 2, torch.float64), q, k, v, batch, VARIANTS[name])
    torch.testing.assert_close(out, dense(q, k, v, batch, 4, VARIANTS[name]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_window_is_transformers_window(window: int) -> None:
    """Which positions a token sees, against the mask that transformers builds for
    ``sliding_window``."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    sees = sliding_window_causal_mask_function(window)
    count = 12
    mask = torch.tensor(
        [
            [bool(sees(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(count)]
            for q in range(count)
        ]
    )
    values = torch.eye(count, dtype=torch.float64).view(1, count, 1, count)
    shape = AttentionShape(1, 1, count, count, torch.float64, torch.float64, torch.device("cpu"))
    batch = AttentionBatch(
        positions=torch.arange(count),
        kv_index=torch.arange(count),
        cu_q=torch.tensor([0, count], dtype=torch.int32),
        cu_q_host=np.array([0, count], np.int32),
        kv_lens=torch.tensor([count], dtype=torch.int32),
        kv_lens_host=np.array([count], np.int32),
        slots=torch.zeros(1, dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
    )
    # Equal keys: every position that is seen has the same weight, and the values tell which it is.
    q, keys = torch.zeros(count, 1, count, dtype=torch.float64), torch.zeros_like(values)
    weights = attend(
        torch_ref.create(shape), q, keys, values, batch, AttentionVariant(1.0, window=window)
    )
    assert torch.equal(weights[:, 0] > 0, mask)


@pytest.mark.parametrize("name", VARIANTS)
def test_long_rows_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    q, k, v, batch = paged(4, 2, torch.float64)
    whole = attend(backend(4, 2, torch.float64), q, k, v, batch, VARIANTS[name])
    monkeypatch.setattr(torch_ref, "REFERENCE_SCORES", 3 * HEADS * 35)
    torch.testing.assert_close(
        attend(backend(4, 2, torch.float64), q, k, v, batch, VARIANTS[name]),
        whole,
        rtol=0,
        atol=1e-14,
    )


def test_query_rows_may_be_strided() -> None:
    q, k, v, batch = paged(4, 2, torch.float64)
    wide = torch.cat((q, torch.full_like(q, torch.nan)), dim=1)
    out = attend(backend(4, 2, torch.float64), wide[:, :HEADS], k, v, batch, VARIANTS["both"])
    assert torch.equal(out, attend(backend(4, 2, torch.float64), q, k, v, batch, VARIANTS["both"]))
