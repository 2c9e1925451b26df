"""One-row decode attention of a layer of DeepSeek-V2-Lite in bf16 on the C++ kernels, over latent
vectors and over K and V made of them (16 heads of 192 and 128 numbers).

    python benchmarks/latent_attention.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from setpoint.engine.attention import cpu_attention
from setpoint.engine.attention.attention_backend import (
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)
from setpoint.engine.kernels.cpu.library import load
from setpoint.engine.quant import cpu_linear
from setpoint.engine.quant.heads import of_heads

BF16, CPU = torch.bfloat16, torch.device("cpu")
HEADS, RANK, ROPE, NOPE, VALUE = 16, 512, 64, 128, 128
PAGE, LAYERS = 16, 27
CONTEXTS = (1024, 4096, 16384)
TURNS = 7
VARIANT = AttentionVariant((NOPE + ROPE) ** -0.5)


def batch_of(context: int) -> AttentionBatch:
    lengths, unused = np.array([context], np.int32), torch.zeros(1, dtype=torch.int64)
    pages = torch.randperm(context // PAGE).int().view(1, -1) + 1
    cu_q = np.array([0, 1], np.int32)
    return AttentionBatch(
        unused,
        unused,
        torch.from_numpy(cu_q),
        cu_q,
        torch.from_numpy(lengths),
        lengths,
        torch.zeros(1, dtype=torch.int32),
        pages,
    )


def best(*calls: Callable[[int], object]) -> list[float]:
    """Seconds per layer of each call, in turns over the layers, whose caches differ."""
    found = [float("inf")] * len(calls)
    for _ in range(TURNS):
        for index, call in enumerate(calls):
            began = time.perf_counter()
            for layer in range(LAYERS):
                call(layer)
            found[index] = min(found[index], (time.perf_counter() - began) / LAYERS)
    return found


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


def measure(context: int) -> None:
    batch = batch_of(context)
    pages = context // PAGE + 1
    latent = cpu_attention.create(
        AttentionShape(HEADS, 1, RANK + ROPE, PAGE, BF16, BF16, CPU, RANK)
    )
    whole = cpu_attention.create(
        AttentionShape(HEADS, HEADS, NOPE + ROPE, PAGE, BF16, BF16, CPU, VALUE)
    )
    caches = [random(pages, PAGE, 1, RANK + ROPE) for _ in range(LAYERS)]
    keys = [random(pages, PAGE, HEADS, NOPE + ROPE) for _ in range(LAYERS)]
    values = [random(pages, PAGE, HEADS, VALUE) for _ in range(LAYERS)]
    method = cpu_linear.create(BF16)
    absorb, expand = (
        [of_heads([method.pack(random(*shape), None) for _ in range(HEADS)]) for _ in range(LAYERS)]
        for shape in ((RANK, NOPE), (VALUE, RANK))
    )
    q, q_latent = random(1, HEADS, NOPE + ROPE), random(1, HEADS, RANK + ROPE)

    def attend(layer: int) -> torch.Tensor:
        cache = caches[layer]
        return latent.forward(q_latent, cache, cache[..., :RANK], batch, VARIANT)

    def attend_and_multiply(layer: int) -> None:
        absorb[layer](q[..., :NOPE])
        expand[layer](attend(layer))

    def attend_whole(layer: int) -> None:
        whole.forward(q, keys[layer], values[layer], batch, VARIANT)

    mine, with_products, other = best(attend, attend_and_multiply, attend_whole)
    print(
        f"{context:6} positions: latent {mine * 1e6:7.0f} µs, with its products"
        f" {with_products * 1e6:7.0f} µs, K and V {other * 1e6:7.0f} µs: {other / mine:.2f} and"
        f" {other / with_products:.2f} times as fast"
    )


if __name__ == "__main__":
    print(f"{torch.get_num_threads()} threads, level {load().level}")
    for context in CONTEXTS:
        measure(context)
