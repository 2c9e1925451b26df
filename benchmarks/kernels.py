"""What the C++ kernels cost compared with torch's own, for the shapes of SmolLM2-135M (hidden 576,
9 query and 3 key/value heads of 64).

    python benchmarks/kernels.py [--threads N] [--level avx2]

Each figure is the best of many alternating runs, in µs per call. With one thread CPU time is
measured, which a busy machine disturbs little; with more, wall time. GB/s counts weights or K and V
read once; GFLOP/s the useful multiplications and additions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from machine import environment

from setpoint.core.model import BLOCK_KINDS
from setpoint.engine.attention import cpu_attention as cpu_attention
from setpoint.engine.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)
from setpoint.engine.kernels.cpu import library
from setpoint.engine.kernels.cpu import ops as cpu_ops
from setpoint.engine.kernels.ref import RefOps
from setpoint.engine.quant import blocks, packed
from setpoint.engine.quant import cpu_linear as panels
from setpoint.engine.quant.linear_method import Blocks, PackedWeight
from setpoint.engine.quant.quantised_numbers import Numbers, block_rows, w8a8_rows

BF16 = torch.bfloat16
KV_DTYPES = (BF16, torch.float8_e4m3fn, torch.float8_e5m2)
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 9, 3, 64, 576, 1536, 49152
PRODUCTS = {
    "qkv": (960, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "head": (VOCAB, HIDDEN),
}
NUM_LAYERS = 30
ALL_PRODUCTS = [
    (name, shape)
    for name, shape in PRODUCTS.items()
    for _ in range(1 if name == "head" else NUM_LAYERS)
]
FOLDER_KINDS = ("Q4_0", "INT4Z", "Q8_0", "INT8Z", "FP8", "W8A8")
FOLDER_SHAPE, FOLDER_MATRICES, GROUP = (4096, 2048), 4, 128
SECONDS_PER_LINE = 2.0

Timer = Callable[[], float]
Pools = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Attend:
    """One batch of rows, repeated over ``copies`` pools, so that it reads as much memory as a
    model."""

    name: str
    counts: tuple[int, ...]
    kv_len: int
    page_size: int = 1
    shared: int = 0
    copies: int = 4
    scattered: bool = True
    """Whether the pages are in random order; otherwise they follow each other, as in a new pool."""
    softcap: float | None = None
    window: int | None = None


BATCHES = (
    Attend("64 decode rows, 192", (1,) * 64, 192, copies=NUM_LAYERS),
    Attend("64 decode rows, 192", (1,) * 64, 192, page_size=16, copies=NUM_LAYERS),
    Attend("64 decode rows, 1056, 1024 shared", (1,) * 64, 1056, shared=1024),
    Attend("1 decode row, 192", (1,), 192, copies=NUM_LAYERS),
    Attend("1 decode row, 4096", (1,), 4096, copies=NUM_LAYERS),
    Attend("prefill 512", (512,), 512),
    Attend("prefill 4 x 512", (512,) * 4, 512, page_size=16),
    Attend("chunk of 512 at 2048", (512,), 2048),
    Attend("the same with a window of 512", (512,), 2048, window=512),
    Attend("the same with a soft cap", (512,), 2048, softcap=50.0),
    Attend("1 decode row, 4096, window of 512", (1,), 4096, copies=NUM_LAYERS, window=512),
)


def best_of(calls: list[Callable[[], object]], clock: Timer) -> list[float]:
    """The seconds of the fastest run of each call. The calls take turns."""
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + SECONDS_PER_LINE
    while time.perf_counter() < end or best[0] == float("inf"):
        for i, call in enumerate(calls):
            begin = clock()
            call()
            best[i] = min(best[i], clock() - begin)
    return best


def products(level: str | None, clock: Timer) -> None:
    ours, theirs = panels.create(BF16, level=level), packed.create(BF16)
    weights = [torch.randn(shape).to(BF16) for _, shape in ALL_PRODUCTS]
    print(
        "\nproducts, bf16                        panels                            oneDNN packed   "
        "       ratio"
    )
    compare_products(
        [(ours.pack(weight, None), theirs.pack(weight, None)) for weight in weights], clock
    )


def block_products(level: str | None, clock: Timer) -> None:
    """Print the products with blocks as in the default model's file: Q4_1, and Q8_0 for the
    head."""
    ours, theirs = blocks.create(BF16, level=level), panels.create(BF16, level=level)
    pairs = []
    for name, (columns, k) in ALL_PRODUCTS:
        kind = "Q8_0" if name == "head" else "Q4_1"
        raw = torch.randint(0, 64, (columns, BLOCK_KINDS[kind].row_bytes(k)), dtype=torch.uint8)
        pairs.append(
            (
                ours.pack(Blocks(kind, raw), None),
                theirs.pack(torch.randn(columns, k).to(BF16), None),
            )
        )
    print(
        "\nproducts, bf16                        blocks of 4 and 8 bits            panels of bf16  "
        "       ratio"
    )
    compare_products(pairs, clock)


def folder_rows(kind: str) -> torch.Tensor:
    """A random matrix of FOLDER_SHAPE in blocks of this kind."""
    columns, k = FOLDER_SHAPE
    bits = 4 if kind in ("Q4_0", "INT4Z") else 8
    codes = torch.randint(0, 1 << bits, (columns, k), dtype=torch.uint8)
    if kind == "FP8":
        codes = (torch.randn(columns, k) * 100).to(torch.float8_e4m3fn).view(torch.uint8)
    group = k if kind == "W8A8" else GROUP
    scales = torch.rand(columns, k // group).half().float()
    zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    numbers = Numbers(codes, scales, group, None if kind == "FP8" else zeros)
    return w8a8_rows(numbers, 0.0) if kind == "W8A8" else block_rows(numbers, bits, kind)


def folder_products(level: str | None, clock: Timer) -> None:
    """Print the products with each kind of block of a quantised folder, on matrices that lie in
    no cache."""
    ours, theirs = blocks.create(BF16, level=level), panels.create(BF16, level=level)
    columns, k = FOLDER_SHAPE
    packs: dict[str, list[PackedWeight]] = {
        "bf16": [
            theirs.pack(torch.randn(columns, k).to(BF16), None) for _ in range(FOLDER_MATRICES)
        ]
    }
    for kind in FOLDER_KINDS:
        packs[kind] = [
            ours.pack_stack([Blocks(kind, folder_rows(kind))], None) for _ in range(FOLDER_MATRICES)
        ]
    print("\nproducts of quantised folders, ps per weight and row")
    weights = FOLDER_MATRICES * columns * k
    for rows in (1, 8, 64):
        x = [torch.randn(rows, k).to(BF16)] * FOLDER_MATRICES
        calls = [partial(multiply, each, x) for each in packs.values()]
        best = best_of(calls, clock)
        for kind, seconds in zip(packs, best, strict=True):
            share = packs[kind][0].num_bytes * 8 / (columns * k)
            print(
                f"{kind:8} {share:5.2f} bits  rows {rows:3}"
                f" {seconds / weights / rows * 1e12:8.2f} ps {best[0] / seconds:6.2f} x bf16"
            )


def compare_products(packs: list[tuple[PackedWeight, PackedWeight]], clock: Timer) -> None:
    """Print the times of two implementations of ALL_PRODUCTS. packs: (ours, theirs) of each."""
    lines = {
        name: [i for i, (other, _) in enumerate(ALL_PRODUCTS) if other == name] for name in PRODUCTS
    }
    for name, chosen in (lines | {"whole model": list(range(len(packs)))}).items():
        num_bytes, sizes = (
            sum(packs[i][0].num_bytes for i in chosen),
            [ALL_PRODUCTS[i][1] for i in chosen],
        )
        for rows in (1, 4, 8, 16, 64, 256):
            inputs = {columns: torch.randn(rows, columns).to(BF16) for columns in (HIDDEN, INNER)}
            columns = [k for _, k in sizes]
            calls = [
                partial(multiply, [packs[i][which] for i in chosen], [inputs[k] for k in columns])
                for which in (0, 1)
            ]
            mine, other = best_of(calls, clock)
            scale = 1e6 if name == "whole model" else 1e6 / len(chosen)
            flops = 2 * rows * sum(n * k for n, k in sizes)
            print(
                f"{name:12} rows {rows:4} {mine * scale:12.1f} µs {num_bytes / mine / 1e9:7.1f}"
                f" GB/s {flops / mine / 1e9:7.0f} GFLOP/s {other * scale:12.1f} µs"
                f" {other / mine:12.2f}"
            )


def multiply(weights: Sequence[PackedWeight], inputs: Sequence[torch.Tensor]) -> None:
    for weight, x in zip(weights, inputs, strict=True):
        weight(x)


def attention(level: str | None, clock: Timer) -> None:
    print(
        "\nattention, bf16, per layer                      µs      GB/s   GFLOP/s   µs with an e4m3"
        " pool        µs with an e5m2 pool    µs of torch's SDPA (contiguous, prefill only)"
    )
    for case in BATCHES:
        q, pools, batch = problem(case)
        variant = AttentionVariant(HEAD_DIM**-0.5, case.softcap, case.window)
        calls = []
        for kind in KV_DTYPES:
            shape = AttentionShape(
                HEADS, KV_HEADS, HEAD_DIM, case.page_size, BF16, kind, torch.device("cpu")
            )
            backend = cpu_attention.create(shape, level=level)
            same_pools = [(keys.to(kind), values.to(kind)) for keys, values in pools]
            calls.append(partial(attend_all, backend, q, same_pools, batch, variant))
        count = case.counts[0]
        if count == case.kv_len:
            dense_q = torch.randn(len(case.counts), HEADS, count, HEAD_DIM).to(BF16)
            dense = torch.randn(len(case.counts), KV_HEADS, count, HEAD_DIM).to(BF16)
            calls.append(partial(sdpa, dense_q, dense, case.copies))
        mine, *other = (seconds / case.copies for seconds in best_of(calls, clock))
        seen = (
            len(case.counts)
            * np.minimum(
                np.arange(case.kv_len - count, case.kv_len) + 1, case.window or case.kv_len
            ).sum()
        )
        keys = min(case.kv_len, count + (case.window or case.kv_len) - 1)
        num_bytes = len(case.counts) * keys * KV_HEADS * HEAD_DIM * 2 * 2
        label = f"{case.name}, pages of {case.page_size}"
        line = (
            f"{label:42} {mine * 1e6:7.0f} {num_bytes / mine / 1e9:9.1f}"
            f" {seen * HEADS * HEAD_DIM * 4 / mine / 1e9:9.0f}"
        )
        print(
            line
            + "".join(f" {seconds * 1e6:12.0f}  ratio {seconds / mine:.2f}" for seconds in other)
        )


def attend_all(
    backend: AttentionBackend,
    q: torch.Tensor,
    pools: Pools,
    batch: AttentionBatch,
    variant: AttentionVariant,
) -> None:
    for k_cache, v_cache in pools:
        backend.forward(q, k_cache, v_cache, batch, variant)


def sdpa(q: torch.Tensor, kv: torch.Tensor, times: int) -> None:
    for _ in range(times):
        torch.nn.functional.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)


def problem(case: Attend) -> tuple[torch.Tensor, Pools, AttentionBatch]:
    num_rows, shared = len(case.counts), case.shared // case.page_size
    own = -(-case.kv_len // case.page_size) - shared
    order = torch.randperm if case.scattered else torch.arange
    pages = (order(shared + num_rows * own) + 1).int()
    table = torch.cat(
        (pages[:shared].expand(num_rows, -1), pages[shared:].view(num_rows, own)), dim=1
    ).contiguous()
    cache = (len(pages) + 1, case.page_size, KV_HEADS, HEAD_DIM)
    pools = [(torch.randn(cache).to(BF16), torch.randn(cache).to(BF16)) for _ in range(case.copies)]
    cu_q = np.concatenate(([0], np.cumsum(case.counts))).astype(np.int32)
    kv_lens = np.full(num_rows, case.kv_len, np.int32)
    slots, unused = torch.arange(num_rows, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    batch = AttentionBatch(
        unused,
        unused,
        torch.from_numpy(cu_q),
        cu_q,
        torch.from_numpy(kv_lens),
        kv_lens,
        slots,
        table,
    )
    q = torch.randn(int(cu_q[-1]), HEADS + 2 * KV_HEADS, HEAD_DIM).to(BF16)[:, :HEADS]
    return q, pools, batch


def elementwise(level: str | None, clock: Timer) -> None:
    print("\nelementwise, bf16                  C++          torch    ratio")
    cos_sin = torch.randn(2048, HEAD_DIM)
    cache = torch.zeros(4097, 1, KV_HEADS, HEAD_DIM, dtype=BF16)
    for rows in (1, 64, 1024):
        x, residual, gate_up = (
            torch.randn(rows, columns).to(BF16) for columns in (HIDDEN, HIDDEN, 2 * INNER)
        )
        weight = torch.ones(HIDDEN, dtype=BF16)
        qkv = (
            torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
            .to(BF16)
            .split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        )
        index = torch.arange(rows)
        both = (cpu_ops.create(BF16, level=level), RefOps())
        lines = {
            "rms_norm": [partial(ops.rms_norm, x, weight, 1e-5) for ops in both],
            "add_rms_norm": [partial(ops.add_rms_norm, x, residual, weight, 1e-5) for ops in both],
            "rope_and_store": [
                partial(ops.rope_and_store, *qkv, cos_sin, index, cache, cache, index)
                for ops in both
            ],
            "silu_mul": [partial(ops.silu_mul, gate_up) for ops in both],
            "gelu_tanh_mul": [partial(ops.gelu_tanh_mul, gate_up) for ops in both],
        }
        for name, calls in lines.items():
            mine, other = best_of(calls, clock)
            print(
                f"{name:15} rows {rows:5} {mine * 1e6:9.1f} µs {other * 1e6:9.1f} µs"
                f" {other / mine:7.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="parts, e.g. attention,elementwise; default: all")
    parser.add_argument("--level", help="instruction set; default: the best")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    about = environment("torch", level=arguments.level)
    level = library.load(arguments.level).level
    print(f"{about}, level {level}, {arguments.threads} threads, {clock.__name__}")
    parts = (products, block_products, folder_products, attention, elementwise)
    for part in parts:
        if part.__name__ in (arguments.only or part.__name__).split(","):
            part(arguments.level, clock)


if __name__ == "__main__":
    main()
