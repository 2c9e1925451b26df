"""Attention problems for tests of backends: rows of any kind on scattered pages, and what the
reference makes of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch

from setpoint.engine.attention import cpu_attention, torch_ref
from setpoint.engine.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)
from setpoint_testing.attending import attend


@dataclass(frozen=True)
class Row:
    count: int
    kv_len: int


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    rows: tuple[Row, ...]
    prefix: int = 0
    """Leading tokens (whole pages) that every longer row has in common with the others."""
    latent_rank: int = 0
    """If not 0, V is the first so many numbers of K."""

    def __str__(self) -> str:
        return f"h{self.heads}/{self.kv_heads}-d{self.head_dim}-p{self.page_size}-n{len(self.rows)}-s{self.prefix}-v{self.latent_rank}"


def random_rows(seed: int, num_rows: int, longest: int) -> tuple[Row, ...]:
    """A mix of decode rows, whole prompts and later chunks."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        kv_len = int(np.exp(rng.uniform(0, np.log(longest))))
        count = (1, kv_len, int(rng.integers(1, kv_len + 1)))[rng.choice(3, p=(0.6, 0.2, 0.2))]
        rows.append(Row(count, kv_len))
    return tuple(rows)


VARIANTS: dict[str, tuple[float | None, int | None, bool]] = {
    "plain": (None, None, False),
    "softcap": (2.5, None, False),
    "window1": (None, 1, False),
    "window100": (None, 100, False),
    "window128": (None, 128, False),
    "both": (50.0, 257, False),
    "sinks": (None, None, True),
    "all": (50.0, 100, True),
}
"""Soft cap, window, and whether there are sinks, below and above the scores."""


@dataclass
class Problem:
    """Random activations and a pool in which every row's pages are scattered."""

    shape: AttentionShape
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: AttentionBatch
    variant: AttentionVariant

    def only(self, row: int) -> Problem:
        begin, end = self.batch.cu_q_host[row], self.batch.cu_q_host[row + 1]
        pick = slice(row, row + 1)
        batch = make_batch(
            np.diff(self.batch.cu_q_host)[pick],
            self.batch.kv_lens_host[pick],
            self.batch.slots[pick].contiguous(),
            self.batch.page_table,
        )
        return Problem(
            self.shape, self.q[begin:end], self.k_cache, self.v_cache, batch, self.variant
        )

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        return attend(
            backend,
            self.q,
            self.k_cache,
            self.v_cache,
            self.batch,
            self.variant,
        )

    def run_on_cpu(self, level: str | None = None) -> torch.Tensor:
        """The result of the C++ kernels at this level; None: the best."""
        return self.run(cpu_attention.create(self.shape, level=level))

    def reference(self) -> torch.Tensor:
        backend = torch_ref.create(replace(self.shape, dtype=torch.float64))
        return attend(
            backend,
            self.q.double(),
            self.k_cache.double(),
            self.v_cache.double(),
            self.batch,
            self.variant,
        )


def make_shape(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    latent_rank: int = 0,
) -> AttentionShape:
    cpu = torch.device("cpu")
    return AttentionShape(
        heads, kv_heads, head_dim, page_size, dtype, kv_dtype or dtype, cpu, latent_rank
    )


def make_batch(
    counts: np.ndarray, kv_lens: np.ndarray, slots: torch.Tensor, page_table: torch.Tensor
) -> AttentionBatch:
    cu_q = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    unused = torch.zeros(int(cu_q[-1]), dtype=torch.int64)
    return AttentionBatch(
        unused,
        unused,
        torch.from_numpy(cu_q),
        cu_q,
        torch.from_numpy(kv_lens),
        kv_lens,
        slots,
        page_table,
    )


def make_problem(
    case: Case, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, variant: str = "plain"
) -> Problem:
    torch.manual_seed(0)
    counts = np.array([row.count for row in case.rows], np.int32)
    kv_lens = np.array([row.kv_len for row in case.rows], np.int32)
    pages = -(-kv_lens // case.page_size)
    order = torch.randperm(int(pages.sum())) + 1
    table = torch.full((len(case.rows) + 2, int(pages.max()) + 1), 2**30, dtype=torch.int32)
    slots = torch.randperm(len(case.rows) + 2)[: len(case.rows)].int()
    for row, (begin, length) in enumerate(zip(np.cumsum(pages) - pages, pages, strict=True)):
        table[slots[row], :length] = order[begin : begin + length].int()
        shared = case.prefix // case.page_size
        if kv_lens[row] > case.prefix:
            table[slots[row], :shared] = order[:shared].int()
    cache_shape = (int(pages.sum()) + 1, case.page_size, case.kv_heads, case.head_dim)
    k_cache, v_cache = (torch.randn(cache_shape).to(kv_dtype or dtype) for _ in range(2))
    if case.latent_rank:
        v_cache = k_cache[..., : case.latent_rank]
    # Neither the dummy page nor what follows the last token of a row may be read.
    k_cache[0] = v_cache[0] = torch.nan
    used = Counter(
        page
        for slot, length in zip(slots.tolist(), pages.tolist(), strict=True)
        for page in table[slot, :length].tolist()
    )
    for row, kv_len in enumerate(kv_lens.tolist()):
        last = int(table[slots[row], (kv_len - 1) // case.page_size])
        if used[last] > 1:
            continue  # others may read all of it
        for cache in (k_cache, v_cache):
            cache[last, (kv_len - 1) % case.page_size + 1 :] = torch.nan
    # q is a strided view into the merged projection.
    merged = torch.randn(int(counts.sum()), case.heads + 2 * case.kv_heads, case.head_dim).to(dtype)
    shape = make_shape(
        case.heads,
        case.kv_heads,
        case.head_dim,
        case.page_size,
        dtype,
        kv_dtype,
        case.latent_rank,
    )
    batch = make_batch(counts, kv_lens, slots, table)
    softcap, window, has_sinks = VARIANTS[variant]
    sinks = torch.linspace(-5, 5, case.heads) if has_sinks else None
    return Problem(
        shape,
        merged[:, : case.heads],
        k_cache,
        v_cache,
        batch,
        AttentionVariant(case.head_dim**-0.5, softcap, window, sinks),
    )


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest error per head vector, relative to the reference's norm."""
    return ((result.double() - reference).norm(dim=-1) / reference.norm(dim=-1)).max().item()
