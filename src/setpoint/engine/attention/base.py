"""The seam of attention: what a backend is given, what it answers, and the table of backends.

Works on the rows of one forward pass over a paged pool. Knows nothing of layers, models or
sampling. The new tokens' K and V are already in the cache when ``forward`` is called
(``Ops.rope_and_store``), those of every row of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from setpoint.core.errors import ConfigError
from setpoint.engine.kernels.registry import Choice, choose


@dataclass(slots=True, frozen=True)
class AttentionShape:
    """What stays the same for every call of a backend; given to its factory once."""

    num_heads: int
    num_kv_heads: int
    """num_heads is a multiple of it; query head h reads key/value head h // (num_heads //
    num_kv_heads)."""
    head_dim: int
    page_size: int
    dtype: torch.dtype
    """Of q and of the output."""
    kv_dtype: torch.dtype
    device: torch.device


@dataclass(slots=True, frozen=True)
class AttentionVariant:
    """What one layer may do differently from another; a constant of the layer, given with every
    call.

    The weights of a query are softmax(cap(scale · q·k)) over the positions it sees, cap(s) =
    softcap · tanh(s / softcap).
    """

    scale: float
    softcap: float | None = None
    """None: scores are not capped."""
    window: int | None = None
    """Positions that a token sees, its own included: the one at position p sees max(0, p - window +
    1)..p. None: 0..p."""

    def __post_init__(self) -> None:
        assert self.softcap is None or self.softcap > 0
        assert self.window is None or self.window > 0


@dataclass(slots=True, frozen=True)
class AttentionBatch:
    """The n rows (T tokens) of one forward pass, written by the runner before it. Row i owns tokens
    [cu_q[i], cu_q[i+1]).

    A row's tokens stand at consecutive positions ending at ``kv_lens[i] - 1``; the token at
    position p sees positions of its own row up to p (how far back: ``AttentionVariant``). Position
    x is on page ``page_table[slots[i], x // page_size]`` at offset ``x % page_size``.
    """

    positions: torch.Tensor
    """[T] int64."""
    kv_index: torch.Tensor
    """[T] int64: page · page_size + offset of each token's own K and V."""
    cu_q: torch.Tensor
    """[n + 1] int32 on the device."""
    cu_q_host: npt.NDArray[np.int32]
    kv_lens: torch.Tensor
    """[n] int32 on the device: positions 0..kv_lens-1 are valid after this step's K and V are
    stored."""
    kv_lens_host: npt.NDArray[np.int32]
    slots: torch.Tensor
    """[n] int32: the row's line in page_table."""
    page_table: torch.Tensor
    """[num_slots, W] int32, permanent (it may be another tensor after the table has grown); entries
    past a row's pages are junk, and so are those of pages before a window that the group's layers
    have: such pages are not read."""
    group: int = 0
    """Which of the model's cache groups: the same rows, on other pages."""


class AttentionBackend(Protocol):
    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        variant: AttentionVariant,
    ) -> torch.Tensor:
        """Causal attention within each row.

        q [T, H, D] (token rows may be strided) and one layer's caches [num_pages + 1, page_size,
        Hkv, D] (contiguous) -> contiguous [T, H, D] in q's dtype. Scores, softmax and the sum are
        in fp32 at least (float64 for float64). A row's result depends on nothing but its own
        tokens.
        """
        ...


BACKENDS = {
    "torch_ref": "setpoint.engine.attention.torch_ref:create",
    "cpu": "setpoint.engine.attention.cpu:create",
}
"""Name -> factory ``create(shape: AttentionShape) -> AttentionBackend``; it raises
KernelsUnavailable with the reason."""

PREFERENCE = {"cpu": ("cpu", "torch_ref"), "cuda": ("torch_ref",)}
"""Device type -> names that "auto" tries, best first."""


def choose_attention(name: str, shape: AttentionShape) -> Choice[AttentionBackend]:
    """The named backend, or for "auto" the best one that runs. ConfigError if the named one is
    unknown or cannot run."""
    if name == "auto":
        return choose(BACKENDS, PREFERENCE[shape.device.type], shape)
    if name not in BACKENDS:
        raise ConfigError(
            f"Unknown attention backend {name!r}; choose one of auto, {', '.join(BACKENDS)}."
        )
    return choose(BACKENDS, (name,), shape)
