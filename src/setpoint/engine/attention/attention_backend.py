"""The interface of attention backends: their inputs, their output, and the table of backends.

Works on the rows of one forward pass over a paged pool. Knows nothing of layers, models or
sampling. A backend is called in two ways: ``prepare`` once for each step and cache group, with the
rows as the host knows them, and ``forward`` for each layer, which reads tensors only. So what the
layers of a step share is computed once, and the layers' calls can be captured and replayed. When
``forward`` is called, the K and V of every row's new tokens in this step are already in the cache
(``Ops.rope_and_store``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from setpoint.core.errors import ConfigError
from setpoint.engine.kernels.kernel_registry import ChosenKernel, choose


@dataclass(slots=True, frozen=True)
class AttentionShape:
    """The properties that are the same for every call of a backend; its factory gets them once."""

    num_heads: int
    num_kv_heads: int
    """num_heads is a multiple of it. Query head h reads key/value head h // (num_heads //
    num_kv_heads)."""
    head_dim: int
    page_size: int
    dtype: torch.dtype
    """Data type of q and of the output."""
    kv_dtype: torch.dtype
    device: torch.device
    v_head_dim: int = 0
    """Size of a head's V and of its output; 0: head_dim."""
    invariant: bool = False
    """Whether a token's bits must depend on the tokens before it alone, not on its chunk, where
    that costs time (``triton_attention``)."""

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim


@dataclass(slots=True, frozen=True)
class AttentionVariant:
    """The properties in which one layer's attention may differ from another's; constant for the
    layer and passed with every call.

    The weights of a query are softmax(cap(scale · q·k)) over the positions it sees, with cap(s) =
    softcap · tanh(s / softcap). A sink joins the sum that divides them, as one more score of every
    query whose value is zero.
    """

    scale: float
    softcap: float | None = None
    """None: scores are not capped."""
    window: int | None = None
    """Number of positions that a token sees, including its own: the token at position p sees max(0,
    p - window + 1)..p. None: 0..p."""
    sinks: torch.Tensor | None = None
    """[H], in at least fp32: the sink of each head, a learned score that is neither scaled nor
    capped. None: there are none."""
    k_scale: float = 1.0
    """K is what the K cache holds, times this; so is V with v_scale. Caches in fp8 are stored so
    (``Ops.rope_and_store``)."""
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        assert self.softcap is None or self.softcap > 0
        assert self.window is None or self.window > 0


@dataclass(slots=True, frozen=True)
class AttentionBatch:
    """The n rows (T tokens) of one forward pass, written by the runner before it. Row i owns tokens
    [cu_q[i], cu_q[i+1]).

    A row's tokens have consecutive positions that end at ``kv_lens[i] - 1``; the token at position
    p sees positions of its own row up to p (how far back: ``AttentionVariant``). Position x is on
    page ``page_table[slots[i], x // page_size]`` at offset ``x % page_size``. In a step with as
    many rows as tokens, no row has more than one.
    """

    positions: torch.Tensor
    """[T] int64."""
    kv_index: torch.Tensor
    """[T] int64: page · page_size + offset of each token's own K and V."""
    cu_q: torch.Tensor
    """[n + 1] int32 on the device."""
    cu_q_host: npt.NDArray[np.int32]
    """The host's copies are for ``prepare`` and for reports; ``forward`` reads none of them."""
    kv_lens: torch.Tensor
    """[n] int32 on the device: positions 0..kv_lens-1 are valid after this step's K and V are
    stored."""
    kv_lens_host: npt.NDArray[np.int32]
    slots: torch.Tensor
    """[n] int32: the row's index into page_table."""
    page_table: torch.Tensor
    """[num_slots, W] int32. It is permanent, but may be replaced by another tensor when the table
    grows. Entries past a row's pages are undefined; so are those of pages before the window of the
    group's layers. Such pages are not read."""
    group: int = 0
    """Index of the model's cache group. The batches of a pass have the same rows, on the pages of
    different groups."""


class AttentionBackend(Protocol):
    """Contract: in each step, ``prepare`` is called once with the batch of every cache group, then
    ``forward`` with these batches."""

    is_capturable: bool
    """Whether both read tensors only, so that a graph of them serves steps of other lengths. Then a
    batch may have rows of length 0 at its end, and tokens after the last row's, whose results are
    finite."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Plan the step's attention for the rows of this group. The plan holds until the next call
        for the group."""
        ...

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        """Causal attention within each row.

        q [T, H, D] (token rows may be strided), one layer's K cache [num_pages + 1, page_size, Hkv,
        D] (contiguous) and V cache [num_pages + 1, page_size, Hkv, value_dim] -> contiguous [T, H,
        value_dim] in q's dtype. The V cache is contiguous or the first value_dim numbers of each
        head of the K cache (latent attention). Scores, softmax and the sum are
        computed in at least fp32 (float64 for float64). A row's result depends only on its own
        tokens.
        """
        ...


BACKENDS = {
    "torch_ref": "setpoint.engine.attention.torch_ref:create",
    "cpu": "setpoint.engine.attention.cpu_attention:create",
    "triton": "setpoint.engine.attention.triton_attention:create",
    "flashinfer": "setpoint.engine.attention.flashinfer_attention:create",
    "fa3": "setpoint.engine.attention.fa3_attention:create",
}
"""Name -> factory ``create(shape: AttentionShape) -> AttentionBackend``. The factory raises
KernelsUnavailable with the reason if the backend cannot run."""

PREFERENCE = {"cpu": ("cpu", "torch_ref"), "cuda": ("triton", "torch_ref")}
"""Device type -> the names that "auto" tries, best first."""


def choose_attention(name: str, shape: AttentionShape) -> ChosenKernel[AttentionBackend]:
    """The named backend or, for "auto", the best one that runs; a library's only if it is named.
    Raises ConfigError if the named one is unknown or cannot run."""
    if name == "auto":
        return choose(BACKENDS, PREFERENCE[shape.device.type], shape)
    if name not in BACKENDS:
        raise ConfigError(
            f"Unknown attention backend {name!r}; choose one of auto, {', '.join(BACKENDS)}."
        )
    return choose(BACKENDS, (name,), shape)
