"""What the kernels in Triton need when they are compiled for GPUs: registers, spilled bytes, shared
memory.

    PYTHONPATH=tests python -m setpoint_testing.compiled_triton --chip 90 [--only NAME] [--write]

Host calls of five models' sizes are made on meta tensors, as a GPU would get them, and whatever they
launch is compiled for the chip (``absent_gpu``). The table is checked in (tests/gpu_kernels/needs.json)
for the version of Triton that made it; a change of a number is a change of a kernel, of its launch,
or of Triton. Nothing of it says how fast a kernel is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
import triton

from setpoint.engine.kernels.device_sampling import (
    DeviceMasks,
    DeviceRows,
    Draws,
    TokenEntries,
)
from setpoint.engine.kernels.ops import Ops, Routing
from setpoint.engine.kernels.triton.absent_gpu import SHARED_BYTES
from setpoint.engine.kernels.triton.grouped import (
    GROUP,
    Scales,
    multiply_heads,
    multiply_pairs,
)
from setpoint.engine.kernels.triton.ops import create
from setpoint.engine.kernels.triton.quantising import quantise_rows
from setpoint.engine.quant.w8a8_int8 import block_size
from setpoint_testing import attention_variants
from setpoint_testing.absent_gpu import Needs, NotingGpu, without_interpreter
from setpoint_testing.attention_variants import AGAIN

NEEDS = Path(__file__).parents[1] / "gpu_kernels/needs.json"
"""Version of Triton -> chip -> name of a call -> kernel -> needs of the variants that the call is the
first to launch."""
CHIPS = tuple(SHARED_BYTES)
BF16, FP32, INT32, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
E4M3 = torch.float8_e4m3fn
TOKENS, SLOTS, PAGES, PAGE = 64, 256, 100, 16
Found = dict[str, dict[str, list[Needs]]]


@dataclass(slots=True, frozen=True)
class Variant:
    """One call of host code whose kernels are compiled."""

    name: str
    call: Callable[[], object]
    decodes: bool = True
    """Whether a decode step launches it, whose kernels must not spill."""
    least: int = 80
    """The first compute capability that has it."""


@dataclass(slots=True, frozen=True)
class Sizes:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    inner: int
    vocabulary: int


QWEN3 = Sizes(1024, 16, 8, 128, 128, 3072, 151_936)
"""Qwen3-0.6B."""
LLAMA = Sizes(4096, 32, 8, 128, 128, 14_336, 128_256)
"""Llama-3.1-8B."""
GPT_OSS = Sizes(2880, 64, 8, 64, 64, 2880, 201_088)
"""gpt-oss-20b."""
GEMMA = Sizes(3584, 16, 8, 256, 256, 14_336, 256_000)
"""Gemma-2-9B."""
DEEPSEEK = Sizes(2048, 16, 1, 576, 64, 1408, 102_400)
"""DeepSeek-V2-Lite, whose heads share a latent vector of 512 numbers."""


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


IDS, POSITIONS = empty(TOKENS, dtype=INT32), empty(TOKENS, dtype=INT64)


def ops() -> Ops:
    """The operations; to list the variants needs no GPU, not even an absent one."""
    return create(BF16)


def norms(sizes: Sizes) -> None:
    x, weight = empty(TOKENS, sizes.hidden), empty(sizes.hidden)
    ops().rms_norm(x, weight, 1e-5)
    ops().add_rms_norm(x, empty(TOKENS, sizes.hidden), weight, 1e-5)


def rotation(sizes: Sizes, kind: torch.dtype) -> None:
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    merged = empty(TOKENS, sum(heads), sizes.head_dim).split(heads, dim=1)
    cache = empty(PAGES, PAGE, sizes.kv_heads, sizes.head_dim, dtype=kind)
    cos_sin = empty(4096, sizes.rotary, dtype=FP32)
    ops().rope_and_store(*merged, cos_sin, POSITIONS, cache, cache, POSITIONS)


def latent(kind: torch.dtype) -> None:
    rank, rotary = DEEPSEEK.head_dim - DEEPSEEK.rotary, DEEPSEEK.rotary
    q, kv = empty(TOKENS, DEEPSEEK.heads, 192), empty(TOKENS, rank + rotary)
    ops().rope_and_store_latent(
        empty(TOKENS, DEEPSEEK.heads, rank),
        q[..., 128:],
        empty(TOKENS, rank),
        kv[:, rank:],
        empty(4096, rotary, dtype=FP32),
        POSITIONS,
        empty(PAGES, PAGE, 1, rank + rotary, dtype=kind),
        POSITIONS,
        interleaved=True,
    )


def place() -> None:
    known, pages = empty(SLOTS, 4096, dtype=INT32), empty(SLOTS, 256, dtype=INT32)
    ops().place_tokens(
        IDS,
        empty(TOKENS + 1, dtype=INT32),
        IDS,
        known,
        pages,
        PAGE,
        TOKENS,
    )


def choose(sizes: Sizes) -> None:
    logits = empty(TOKENS, sizes.vocabulary)
    ops().best_tokens(logits)
    ops().top_tokens(logits, 20)
    ops().log_sum_exp(empty(TOKENS, sizes.vocabulary, dtype=FP32))
    ops().mask_tokens(logits, POSITIONS, empty(TOKENS, sizes.vocabulary // 32, dtype=INT32))
    ops().soft_cap(logits, 30.0)


def sample(kind: torch.dtype) -> None:
    """What steps launch that need penalties, biases, masks and every kind of draw."""
    kernels, vocabulary = ops().sampling, QWEN3.vocabulary
    logits = empty(TOKENS, vocabulary, dtype=kind)
    entries = TokenEntries(empty(2 * TOKENS + 1, dtype=INT32), IDS, empty(TOKENS, dtype=FP32))
    known = empty(SLOTS, 4096, dtype=INT32)
    rows = DeviceRows(empty(TOKENS, 16, dtype=INT32), IDS, known, entries)
    masks = DeviceMasks(IDS, empty(3, vocabulary // 32, dtype=INT32))
    kernels.edit(logits, rows, masks, in_place=True)
    for few in (rows, replace(rows, entries=None)):
        kernels.edit(logits, few, masks, in_place=False)
        kernels.edit(logits, few, None, in_place=False)
    for draws in Draws:
        kernels.choose(logits, rows, draws)
    kernels.place(POSITIONS, rows)


def mixture(routing: Routing, experts: int, sizes: Sizes, shares: bool) -> None:
    ids, weights = ops().route(empty(TOKENS, experts), routing)
    ops().place_experts(ids, empty(experts, dtype=INT64), POSITIONS)
    places = empty(experts, 4, dtype=INT32)
    ops().place_experts(ids, empty(experts, dtype=INT64), POSITIONS, places)
    shared = empty(TOKENS, sizes.hidden) if shares else None
    ops().combine(empty(TOKENS * routing.num_chosen, sizes.hidden), weights, shared)


def experts(sizes: Sizes, experts: int, chosen: int, tokens: int, kind: torch.dtype = BF16) -> None:
    """Both products of a mixture. kind: of its numbers; with scales if they have 8 bits."""
    for inputs, outputs, per_row in (
        (sizes.hidden, 2 * sizes.inner, chosen),
        (sizes.inner, sizes.hidden, 1),
    ):
        rows = tokens * chosen // per_row
        groups = 1 if kind == torch.int8 else -(-inputs // GROUP)
        scales = None
        if kind.itemsize == 1:
            scales = Scales(
                empty(rows, groups, dtype=FP32), empty(experts, outputs, groups, dtype=FP32)
            )
        multiply_pairs(
            empty(rows, inputs, dtype=kind),
            empty(experts, outputs, inputs, dtype=kind),
            empty(tokens, chosen, dtype=INT32),
            dtype=BF16,
            biases=empty(experts, outputs) if sizes is GPT_OSS else None,
            scales=scales,
        )


def rounded(sizes: Sizes, kind: torch.dtype, group: int) -> None:
    """A product of 8 bits, of few tokens and of many."""
    for rows in (TOKENS, 2048):
        x = empty(rows, sizes.hidden)
        run = block_size(sizes.hidden) if kind == torch.int8 else 1
        codes, scales = quantise_rows(x, kind, group=group, run=run)
        if kind == torch.int8 or group:
            weights = empty(1, sizes.inner, sizes.hidden, dtype=kind)
            of_weights = empty(1, sizes.inner, scales.shape[1], dtype=FP32)
            multiply_pairs(codes, weights, None, dtype=BF16, scales=Scales(scales, of_weights))


def invariant(kind: torch.dtype, rows: int) -> None:
    """Products of which a row has the same bits in every batch: dense ones of narrow and of wide
    tiles, and in bf16 of heads. kind: of the numbers; e4m3 both with scales of rows and of
    groups."""
    for inputs, outputs in ((LLAMA.hidden, LLAMA.hidden), (LLAMA.hidden, 2 * LLAMA.inner)):
        x = empty(rows, inputs, dtype=kind)
        weights = empty(1, outputs, inputs, dtype=kind)
        for groups in (1, inputs // GROUP) if kind == E4M3 else (0,):
            scales = groups and Scales(
                empty(rows, groups, dtype=FP32), empty(1, outputs, groups, dtype=FP32)
            )
            dtype = BF16 if kind == E4M3 else kind
            multiply_pairs(x, weights, None, dtype=dtype, scales=scales or None, fixed=True)
    if kind == BF16:
        multiply_heads(empty(rows, 16, 192)[..., :128], empty(16, 512, 128))


def invariant_experts(rows: int) -> None:
    """A product of DeepSeek's experts of which a row has the same bits in every batch."""
    x, weights = empty(rows, DEEPSEEK.hidden), empty(64, DEEPSEEK.inner, DEEPSEEK.hidden)
    multiply_pairs(x, weights, empty(rows, 6, dtype=INT32), dtype=BF16, fixed=True)


def products() -> Iterator[Variant]:
    """Products with experts and of numbers of 8 bits; of many tokens, which are multiplied in other
    tiles, too."""
    for name, sizes, count, chosen in (("gpt-oss", GPT_OSS, 32, 4), ("deepseek", DEEPSEEK, 64, 6)):
        for tokens in (TOKENS, 4096):
            yield Variant(
                f"{name} experts, {tokens} tokens",
                lambda sizes=sizes, count=count, chosen=chosen, tokens=tokens: experts(
                    sizes, count, chosen, tokens
                ),
            )
    for dtype in (torch.float16, FP32):
        yield Variant(
            f"deepseek experts in {dtype}",
            lambda dtype=dtype: [experts(DEEPSEEK, 64, 6, each, dtype) for each in (TOKENS, 4096)],
        )
    for kind, least in ((E4M3, 90), (torch.int8, 80)):
        yield Variant(
            f"deepseek experts in {kind}",
            lambda kind=kind: [experts(DEEPSEEK, 64, 6, each, kind) for each in (TOKENS, 4096)],
            least=least,
        )
    yield Variant("llama int8", lambda: rounded(LLAMA, torch.int8, 0))
    yield Variant("llama fp8", lambda: rounded(LLAMA, E4M3, 0))
    yield Variant("llama fp8 by 128", lambda: rounded(LLAMA, E4M3, GROUP), least=90)
    for kind in (BF16, torch.float16, FP32, E4M3):
        least = 90 if kind == E4M3 else 80
        yield Variant(
            f"invariant products in {kind}", lambda kind=kind: invariant(kind, 1), least=least
        )
        yield Variant(
            f"invariant products in {kind}, {AGAIN}",
            lambda kind=kind: [invariant(kind, rows) for rows in (2, 64, 257, 4096)],
            least=least,
        )
    for rows, words in ((1, ""), (4096, f", {AGAIN}")):
        yield Variant(f"invariant experts{words}", lambda rows=rows: invariant_experts(rows))


def operations() -> Iterator[Variant]:
    """The operations, at the sizes of five models."""
    grouped = Routing(8, "sigmoid", True, 2.5, num_groups=8, num_open=4, num_best=2)
    for name, sizes in (
        ("qwen3", QWEN3), ("llama", LLAMA), ("gpt-oss", GPT_OSS), ("gemma", GEMMA), ("deepseek", DEEPSEEK),
    ):  # fmt: skip
        yield Variant(f"{name} norms", lambda sizes=sizes: norms(sizes))
        if sizes is DEEPSEEK:
            continue
        for kind in (BF16, E4M3, torch.float8_e5m2) if sizes is LLAMA else (BF16, E4M3):
            yield Variant(f"{name} {kind}", lambda sizes=sizes, kind=kind: rotation(sizes, kind))
    for kind in (BF16, E4M3):
        yield Variant(f"deepseek {kind}", lambda kind=kind: latent(kind))
    yield Variant("qwen3 heads", lambda: ops().rms_norm(empty(TOKENS, 16, 128), empty(128), 1e-6))
    yield Variant("placing", place)
    yield Variant("embedding", lambda: ops().embedding(IDS, empty(1000, 4096), 1.0))
    yield Variant("choosing", lambda: choose(LLAMA))
    for kind in (BF16, FP32):
        yield Variant(f"sampling {kind}", lambda kind=kind: sample(kind))
    yield Variant("silu", lambda: ops().silu_mul(empty(TOKENS, 2 * LLAMA.inner)))
    yield Variant("gelu", lambda: ops().gelu_tanh_mul(empty(TOKENS, 2 * GEMMA.inner)))
    yield Variant(
        "swiglu", lambda: ops().clamped_swiglu_mul(empty(TOKENS, 2 * GPT_OSS.inner), 1.702, 7.0)
    )
    yield Variant(
        "gpt-oss mixture",
        lambda: mixture(Routing(4, "softmax_of_chosen"), 32, GPT_OSS, False),
    )
    yield Variant("deepseek mixture", lambda: mixture(Routing(6), 64, DEEPSEEK, True))
    yield Variant("deepseek_v3 mixture", lambda: mixture(grouped, 256, DEEPSEEK, True))


def variants() -> list[Variant]:
    attention = (Variant(*each) for each in attention_variants.variants())
    return [*operations(), *products(), *attention]


def compile_for(chip: int, only: str = "") -> Found:
    """Make the calls whose names have ``only`` in them."""
    gpu = NotingGpu(chip)
    gpu.install()
    found: Found = {}
    for variant in variants():
        if only in variant.name and variant.least <= chip:
            gpu.needs = {}
            variant.call()
            if gpu.needs:
                found[variant.name] = gpu.needs
    return found


def run(chip: int, cache: Path, only: str = "") -> Found:
    """``compile_for`` in a process of its own for each chip: a process keeps what it has compiled.
    cache: the folder in which Triton keeps it."""
    command = ["setpoint_testing.compiled_triton", f"--chip={chip}", f"--only={only}"]
    return _read(json.loads(without_interpreter(command, cache)))


def recorded(chip: int) -> Found | None:
    """The table that is checked in; None if there is none for this version of Triton."""
    table = json.loads(NEEDS.read_text()).get(triton.__version__, {}).get(str(chip))
    return table and _read(table)


def _read(table: dict[str, dict[str, list[list[int]]]]) -> Found:
    return {
        call: {kernel: [Needs(*each) for each in needs] for kernel, needs in kernels.items()}
        for call, kernels in table.items()
    }


def _written(found: Found) -> dict[str, dict[str, list[list[int]]]]:
    return {
        call: {kernel: [list(astuple(each)) for each in needs] for kernel, needs in kernels.items()}
        for call, kernels in found.items()
    }


def show(chip: int, found: Found) -> None:
    print(f"{'kernel':<26} {'call':<28} chip registers spilled shared", file=sys.stderr)
    for call, kernels in found.items():
        for kernel, needs in kernels.items():
            for each in needs:
                print(
                    f"{kernel:<26} {call:<28} {chip:>4} {each.registers:>9} {each.spilled_bytes:>7}"
                    f" {each.shared_bytes:>6}",
                    file=sys.stderr,
                )


def write(chip: int, found: Found) -> None:
    tables = json.loads(NEEDS.read_text()) if NEEDS.exists() else {}
    tables.setdefault(triton.__version__, {})[str(chip)] = _written(found)
    text = json.dumps(tables, indent=1)
    NEEDS.write_text(re.sub(r"\n {4,}|\n   (?=})", " ", text) + "\n")  # a line for each call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chip", type=int, choices=CHIPS, required=True)
    parser.add_argument("--only", default="", help="calls with this in their names")
    parser.add_argument("--write", action="store_true", help="check the table in")
    args = parser.parse_args()
    found = compile_for(args.chip, args.only)
    show(args.chip, found)
    if args.write:
        write(args.chip, found)
    else:
        print(json.dumps(_written(found)))


if __name__ == "__main__":
    main()
