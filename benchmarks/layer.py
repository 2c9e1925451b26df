"""What each kernel of a layer costs inside a step, for the steps of W1-W4, and how close it is to
its bound.

    python benchmarks/layer.py [--threads N] [--level avx2] [--only "decode 64"] [--seconds 4]

All kernels of a layer run in the model's order on weights and pools of all 30 layers of
SmolLM2-135M (random numbers), so every one meets the caches as its predecessor left them. Figures
are medians in µs per layer. The bound of a kernel is the larger of two times: useful
multiplications and additions at the rate of a large product, bytes at the rate of a sum over 1 GB,
both measured here first. Bytes are weights, K and V (what rows share counts once), and activations
read and written once: those usually stay in the caches, so elementwise kernels may beat their
bound.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from machine import environment

from setpoint.engine.attention import cpu_attention as cpu_attention
from setpoint.engine.attention.attention_backend import (
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)
from setpoint.engine.kernels.cpu import library
from setpoint.engine.kernels.cpu import ops as cpu_ops
from setpoint.engine.kernels.ops import SILU
from setpoint.engine.quant import cpu_linear as panels
from setpoint.engine.quant.linear_method import PackedWeight
from setpoint_testing.attention_problems import make_batch

BF16 = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, NUM_LAYERS = 9, 3, 64, 576, 1536, 30
PRODUCTS = {
    "qkv": (960, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
Pools = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Attend:
    """One batch of rows, repeated over ``copies`` pools, so that it reads as much memory as a
    model."""

    name: str
    counts: tuple[int, ...]
    kv_len: int
    shared: int = 0
    copies: int = 4
    scattered: bool = True
    """Whether the pages are in random order; otherwise they follow each other, as in a new pool."""


STEPS = (
    Attend("prefill 4 x 512", (512,) * 4, 512),
    Attend("prefill 16 x 128", (128,) * 16, 128),
    Attend("prefill 64 x 32 behind 1024 shared", (32,) * 64, 1056, shared=1024),
    Attend("decode 64 at 160", (1,) * 64, 160),
    Attend("decode 64 at 1056, 1024 shared", (1,) * 64, 1056, shared=1024),
    Attend("decode 64 at 1056", (1,) * 64, 1056),
    Attend("decode 1 at 160", (1,), 160),
    Attend("decode 1 at 4000", (1,), 4000),
)
LARGEST_POOLS_BYTES = 1 << 30
"""Most bytes of all pools together; beyond this, layers share pools."""


@dataclass(frozen=True)
class Rates:
    flops: float
    """Multiplications and additions per second of a large product."""
    bytes: float
    """Bytes per second read from memory."""

    def bound_s(self, flops: float, num_bytes: float) -> float:
        return max(flops / self.flops, num_bytes / self.bytes)


def measure_rates(level: str | None) -> Rates:
    linear, x = (
        panels.create(BF16, level=level).pack(torch.randn(1024, 1024).to(BF16), None),
        torch.randn(2048, 1024).to(BF16),
    )
    memory = torch.ones(1 << 28)
    product, total = (
        min(seconds(call) for _ in range(10)) for call in (lambda: linear(x), memory.sum)
    )
    return Rates(2 * 2048 * 1024 * 1024 / product, memory.nbytes / total)


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Layers:
    """All layers' weights; runs a step of them and notes how long each kernel took."""

    def __init__(self, level: str | None, scattered: bool) -> None:
        method = panels.create(BF16, level=level)

        def pack(name: str, weight: torch.Tensor) -> PackedWeight:
            return (
                method.pack_gated(weight, None, SILU)
                if name == "gate_up"
                else method.pack(weight, None)
            )

        self.level = level
        self.scattered = scattered
        self.ops = cpu_ops.create(BF16, level=level)
        self.weights: list[dict[str, PackedWeight]] = [
            {
                name: pack(name, torch.randn(shape).mul(0.02).to(BF16))
                for name, shape in PRODUCTS.items()
            }
            for _ in range(NUM_LAYERS)
        ]
        self.norm = torch.ones(HIDDEN, dtype=BF16)
        self.cos_sin = torch.randn(8192, HEAD_DIM)

    def prepare(self, case: Attend) -> Callable[[dict[str, float]], None]:
        """A function that runs the step once and adds the seconds of each kernel to its
        argument."""
        pages = case.shared + len(case.counts) * (case.kv_len - case.shared)
        per_pool = pages * KV_HEADS * HEAD_DIM * 4
        copies = min(NUM_LAYERS, LARGEST_POOLS_BYTES // per_pool)
        _, pools, batch = problem(replace(case, copies=copies, scattered=self.scattered))
        shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, 1, BF16, BF16, torch.device("cpu"))
        attention, variant = (
            cpu_attention.create(shape, level=self.level),
            AttentionVariant(HEAD_DIM**-0.5),
        )
        num_tokens, count = sum(case.counts), case.counts[0]
        hidden = torch.randn(num_tokens, HIDDEN).to(BF16)
        positions = torch.arange(case.kv_len - count, case.kv_len).repeat(len(case.counts))
        kv_index = batch.page_table[:, case.kv_len - count : case.kv_len].reshape(-1).long()
        ops = self.ops

        def step(spent: dict[str, float]) -> None:
            def timed(
                name: str, call: Callable[..., torch.Tensor], *arguments: object
            ) -> torch.Tensor:
                begin = time.perf_counter()
                result = call(*arguments)
                spent[name] += time.perf_counter() - begin
                return result

            residual, x = hidden.clone(), hidden
            timed("attention", attention.prepare, batch)
            for layer, weights in enumerate(self.weights):
                k_cache, v_cache = pools[layer % len(pools)]
                x = timed("norms", lambda x: ops.add_rms_norm(x, residual, self.norm, 1e-5)[0], x)
                qkv = (
                    timed("qkv", weights["qkv"], x)
                    .view(num_tokens, -1, HEAD_DIM)
                    .split((HEADS, KV_HEADS, KV_HEADS), dim=1)
                )
                q = timed(
                    "rope and store",
                    ops.rope_and_store,
                    *qkv,
                    self.cos_sin,
                    positions,
                    k_cache,
                    v_cache,
                    kv_index,
                )
                x = timed(
                    "attention", attention.forward, q, k_cache, v_cache, batch, variant
                ).flatten(1)
                x = timed("o", weights["o"], x)
                x = timed("norms", lambda x: ops.add_rms_norm(x, residual, self.norm, 1e-5)[0], x)
                x = timed("gate_up and silu", weights["gate_up"], x)
                x = timed("down", weights["down"], x)

        return step


def problem(case: Attend) -> tuple[torch.Tensor, Pools, AttentionBatch]:
    num_rows, shared = len(case.counts), case.shared
    own = case.kv_len - shared
    order = torch.randperm if case.scattered else torch.arange
    pages = (order(shared + num_rows * own) + 1).int()
    table = torch.cat(
        (pages[:shared].expand(num_rows, -1), pages[shared:].view(num_rows, own)), dim=1
    ).contiguous()
    cache = (len(pages) + 1, 1, KV_HEADS, HEAD_DIM)
    pools = [(torch.randn(cache).to(BF16), torch.randn(cache).to(BF16)) for _ in range(case.copies)]
    batch = make_batch(
        np.array(case.counts, np.int32),
        np.full(num_rows, case.kv_len, np.int32),
        torch.arange(num_rows, dtype=torch.int32),
        table,
    )
    q = torch.randn(sum(case.counts), HEADS + 2 * KV_HEADS, HEAD_DIM).to(BF16)[:, :HEADS]
    return q, pools, batch


def work(case: Attend) -> dict[str, tuple[float, float]]:
    """Kernel -> (multiplications and additions, bytes) of one layer."""
    tokens, count = sum(case.counts), case.counts[0]
    seen = len(case.counts) * (count * (case.kv_len - count) + count * (count + 1) // 2)
    keys = case.shared + len(case.counts) * (case.kv_len - case.shared)
    result: dict[str, tuple[float, float]] = {
        "norms": (0, 2 * tokens * HIDDEN * 2 * 4),
        "rope and store": (0, tokens * (HEADS + 2 * KV_HEADS) * HEAD_DIM * 2 * 2),
        "attention": (
            seen * HEADS * HEAD_DIM * 4,
            keys * KV_HEADS * HEAD_DIM * 4 + 2 * tokens * HEADS * HEAD_DIM * 2,
        ),
    }
    for name, (n, k) in PRODUCTS.items():
        result["gate_up and silu" if name == "gate_up" else name] = (
            2 * tokens * n * k,
            2 * (n * k + tokens * (n + k)),
        )
    return result


def report(case: Attend, layers: Layers, rates: Rates, limit_s: float) -> None:
    step = layers.prepare(case)
    step(defaultdict(float))
    runs: list[dict[str, float]] = []
    end = time.perf_counter() + limit_s
    while time.perf_counter() < end or len(runs) < 3:
        runs.append(defaultdict(float))
        step(runs[-1])
    medians = {name: statistics.median(run[name] for run in runs) / NUM_LAYERS for name in runs[0]}
    total, bounds = (
        sum(medians.values()),
        {name: rates.bound_s(*amounts) for name, amounts in work(case).items()},
    )
    print(
        f"\n{case.name:38} {'µs':>9} {'share':>7} {'bound':>9} {'of bound':>9}   ({len(runs)} runs)"
    )
    for name, spent in medians.items():
        print(
            f"  {name:36} {spent * 1e6:9.1f} {spent / total:7.1%} {bounds[name] * 1e6:9.1f}"
            f" {bounds[name] / spent:9.0%}"
        )
    print(
        f"  {'all':36} {total * 1e6:9.1f} {1:7.1%} {sum(bounds.values()) * 1e6:9.1f}"
        f" {sum(bounds.values()) / total:9.0%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--level", help="instruction set; default: the best")
    parser.add_argument("--only", default="", help="steps whose name holds this")
    parser.add_argument(
        "--scattered",
        action="store_true",
        help="pages in random order, not as a fresh pool hands them out",
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="per step")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"{environment('torch')}, level {library.load(arguments.level).level}, {arguments.threads}"
        " threads"
    )
    rates = measure_rates(arguments.level)
    print(f"a large product {rates.flops / 1e9:.0f} GFLOP/s, memory {rates.bytes / 1e9:.0f} GB/s")
    layers = Layers(arguments.level, arguments.scattered)
    for case in STEPS:
        if arguments.only in case.name:
            report(case, layers, rates, arguments.seconds)


if __name__ == "__main__":
    main()
