"""The attention of real models' shapes, to be compiled for a GPU that is absent: calls of the
backend on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from setpoint.engine.attention.attention_backend import (
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)
from setpoint.engine.attention.triton_attention import create
from setpoint.engine.kernels.ops import KernelsUnavailable

BF16, FP32 = torch.bfloat16, torch.float32
META = torch.device("meta")


@dataclass(frozen=True)
class Model:
    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype = BF16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent_rank: int = 0


MODELS = {
    "llama-8b": Model(32, 8, 128),
    "llama-8b e4m3": Model(32, 8, 128, torch.float8_e4m3fn),
    "llama-8b e5m2": Model(32, 8, 128, torch.float8_e5m2),
    "smollm2": Model(9, 3, 64),
    "gpt-oss-20b": Model(64, 8, 64, window=128, sinks=True),
    "gemma2-9b": Model(16, 8, 256, window=4096, softcap=50.0),
    "deepseek-v2-lite": Model(16, 1, 576, latent_rank=512),
}


def variants() -> Iterator[tuple[str, Callable[[], object], bool]]:
    """(name, call, is it a decode step) for each model and both kinds of steps."""
    for name, model in MODELS.items():
        yield f"{name} attention, decode", lambda model=model: attend(model, 64, 64), True
        yield f"{name} attention, extend", lambda model=model: attend(model, 512, 64), False
    for name in ("llama-8b", "gpt-oss-20b", "gemma2-9b", "deepseek-v2-lite"):
        for tokens, words in ((64, ""), (512, f", {AGAIN}")):
            yield (
                f"{name} invariant attention{words}",
                lambda name=name, tokens=tokens: attend(MODELS[name], tokens, 64, invariant=True),
                True,
            )


AGAIN = "with other rows"
"""Ends the names of calls that launch what the call before has compiled, so that they are not in
the table."""


def attend(model: Model, tokens: int, rows: int, *, invariant: bool = False) -> None:
    """One layer's attention, where the chip has the types."""
    shape = AttentionShape(
        model.heads, model.kv_heads, model.head_dim, 16, BF16, model.kv_dtype, META,
        model.latent_rank, invariant,
    )  # fmt: skip
    cache = (1000, 16, model.kv_heads)
    keys = torch.empty(*cache, model.head_dim, dtype=model.kv_dtype, device=META)
    values = keys[..., : model.latent_rank] if model.latent_rank else torch.empty_like(keys)
    q = torch.empty(tokens, model.heads, model.head_dim, dtype=BF16, device=META)
    sinks = torch.empty(model.heads, dtype=FP32, device=META) if model.sinks else None
    variant = AttentionVariant(0.1, model.softcap, model.window, sinks)
    try:
        backend = create(shape)
    except KernelsUnavailable:
        assert model.kv_dtype == torch.float8_e4m3fn  # sm_80 has none
        return
    batch = meta_batch(tokens, rows)
    backend.prepare(batch)
    backend.forward(q, keys, values, batch, variant)


def meta_batch(tokens: int, rows: int) -> AttentionBatch:
    """Rows of which no length is known."""

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=META)

    unknown = np.empty(0, np.int32)
    return AttentionBatch(
        empty(tokens, dtype=torch.int64), empty(tokens, dtype=torch.int64), empty(rows + 1),
        unknown, empty(rows), unknown, empty(rows), empty(rows, 256),
    )  # fmt: skip
