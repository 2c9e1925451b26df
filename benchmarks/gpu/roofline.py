"""About how long a step of a model takes on a GPU, predicted from data sheets: for each kernel the
bytes that it must move and the operations that it must compute, and which of the two takes longer,
at the share of a data sheet's rates that a copy and a product reach.

    python benchmarks/gpu/roofline.py [--model NAME --chip NAME]

prints the table of docs/gpu.md or, with the options, the kernels of one model's steps. Nothing is
measured here. Few kernels reach the rates of a copy or a product, so what is predicted is about the
least time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.models import CONFIGS, GPT_OSS, write_model

from setpoint.checkpoint.spec import read_spec
from setpoint.core.model import ModelSpec, numbers_per_token

TB, TFLOP = 1e12, 1e12
COPIES, PRODUCTS = 4.3 / 4.8, 788 / 989.5
"""Shares of a data sheet's rates that are reached: those of a copy and of a product in bf16 on an
H200, taken for every chip and for fp8, so that chips are compared by one measure."""
EXACT = "kv_b"
"""The matrix of attention that is never rounded (decision 0066)."""


@dataclass(slots=True, frozen=True)
class Chip:
    """A GPU's figures by its data sheet: rates of dense products in operations per second, sizes in
    bytes."""

    name: str
    memory: float
    bytes_per_s: float
    bf16: float
    fp8: float
    """0: it has no products in fp8."""
    l2: float
    kernel_s: float = 0.5e-6
    """What a kernel adds within a graph: 3.4 µs for one of 2.9 (NVIDIA, "Getting Started with CUDA
    Graphs", on a V100)."""
    graph_s: float = 2.5e-6
    """What the launch of a graph takes (NVIDIA, "Constant Time Launch for Straight-Line CUDA
    Graphs")."""

    @property
    def copies(self) -> float:
        """Bytes per second that are reached."""
        return COPIES * self.bytes_per_s

    def rate(self, product: str) -> float:
        """Operations per second that are reached in products of this type."""
        return PRODUCTS * (self.fp8 if product == "fp8" else self.bf16)


CHIPS = (
    # NVIDIA A100 Tensor Core GPU data sheet, SXM, 80 GB; Ampere architecture white paper.
    Chip("A100 80GB", 80e9, 2.039 * TB, 312 * TFLOP, 0, 40e6),
    # NVIDIA H100 Tensor Core GPU data sheet, SXM; half of its rates "with sparsity".
    Chip("H100 SXM", 80e9, 3.35 * TB, 989.5 * TFLOP, 1979 * TFLOP, 50e6),
    # NVIDIA H200 data sheet; half of its rates "with sparsity".
    Chip("H200", 141e9, 4.8 * TB, 989.5 * TFLOP, 1979 * TFLOP, 50e6),
    # NVIDIA DGX B200 data sheet, an eighth of the machine and half of its rates with sparsity; L2
    # as the driver reports it (pytorch/ao, pull request 4002).
    Chip("B200", 180e9, 8.0 * TB, 2250 * TFLOP, 4500 * TFLOP, 126e6),
)


@dataclass(slots=True, frozen=True)
class Form:
    """How numbers are kept: bytes of each, and the type in which they are multiplied."""

    name: str
    weight: float
    expert: float
    kv: float
    product: str = "bf16"
    scale: float = 0.0
    """Bytes of an output's scale."""


BF16 = Form("bf16", 2, 2, 2)
FP8 = Form("fp8", 1, 1, 1, "fp8", 4)
MXFP4 = Form("mxfp4 experts", 2, 17 / 32, 2)
"""Experts as gpt-oss's checkpoints have them: 17 bytes for 32 numbers. Setpoint multiplies them in
bf16 on GPUs; this is what a kernel for them could reach."""


@dataclass(slots=True, frozen=True)
class Step:
    """Rows of one length: each computes ``new`` tokens, the last one at position ``length`` - 1."""

    rows: int
    length: int
    new: int = 1
    sampled: int = 0
    """Tokens with logits; 0: one of each row."""

    @property
    def tokens(self) -> int:
        return self.rows * self.new

    def pairs(self, window: int | None) -> int:
        """Pairs of a query and a position that it sees."""
        seen = range(self.length - self.new + 1, self.length + 1)
        return self.rows * sum(min(each, window or each) for each in seen)

    def positions(self, window: int | None) -> int:
        """Positions that the rows read."""
        return self.rows * min(self.length, (window or self.length) + self.new - 1)


DECODE = tuple(Step(rows, 1536) for rows in (1, 64, 256))
PREFILL = Step(1, 8192, 8192)
TIMES = "milliseconds: decode step of 1 row / 64 rows / 256 rows / prefill of 8,192 tokens"
"""What the cells of the table are, in its head."""


@dataclass(slots=True, frozen=True)
class Kernel:
    """``count`` equal launches of a step."""

    name: str
    count: int
    streamed: float = 0.0
    """Bytes of weights, keys and values that one launch reads or writes."""
    activations: float = 0.0
    """Bytes of what lies between it and its neighbours; they stay in the L2 cache if they fit."""
    flops: float = 0.0
    product: str = "bf16"

    def moved(self, chip: Chip) -> float:
        """Bytes that one launch moves from and to the memory."""
        return self.streamed + (self.activations if self.activations > chip.l2 else 0.0)

    def bounds(self, chip: Chip) -> dict[str, float]:
        """Seconds of one launch by what limits it."""
        return {
            "memory": self.moved(chip) / chip.copies,
            "products": self.flops / chip.rate(self.product),
            "launch": chip.kernel_s,
        }

    def seconds(self, chip: Chip) -> float:
        """Seconds of all launches."""
        bounds = self.bounds(chip)
        return self.count * (max(bounds["memory"], bounds["products"]) + bounds["launch"])


def kernels(spec: ModelSpec, form: Form, step: Step) -> list[Kernel]:
    """The launches of a step of greedy rows, but two that only place tokens and plan attention."""
    hidden, tokens, layers = spec.hidden_size, step.tokens, spec.num_layers
    sampled = step.sampled or step.rows
    return [
        Kernel("embedding", 1, tokens * hidden * 2, tokens * hidden * 2),
        Kernel("norm", layers * spec.num_norms + 1, hidden * 2, 4 * tokens * hidden * 2),
        *_attention(spec, form, step),
        *_mlps(spec, form, tokens),
        *_product("head", 1, hidden, spec.vocab_size, sampled, form),
        Kernel("best token", 2, 0, sampled * spec.vocab_size * 2),
    ]


def _product(
    name: str,
    count: int,
    inputs: int,
    outputs: int,
    rows: float,
    form: Form,
    *,
    exact: bool = False,
) -> Iterator[Kernel]:
    """A product, after rounding its activations if they are rounded."""
    form = BF16 if exact else form
    if form.product == "fp8":
        yield Kernel("rounding", count, 0, 3 * rows * inputs)
    read = inputs * outputs * form.weight + outputs * form.scale
    moved = rows * (inputs * form.weight + outputs * 2)
    yield Kernel(name, count, read, moved, 2 * rows * inputs * outputs, form.product)


def _attention(spec: ModelSpec, form: Form, step: Step) -> Iterator[Kernel]:
    layers, tokens, shapes = spec.num_layers, step.tokens, dict(spec.attention_matrices)
    cached = numbers_per_token(spec.cache_parts) * form.kv
    if spec.latent is None:
        columns = sum(shapes.pop(name)[1] for name in ("q", "k", "v"))
        shapes = {"qkv": (spec.hidden_size, columns), **shapes}
    for name, (inputs, outputs) in shapes.items():
        if name == EXACT:  # K's part and V's part meet other vectors
            yield from _product(name, 2 * layers, inputs, outputs // 2, tokens, BF16)
        else:
            yield from _product(name, layers, inputs, outputs, tokens, form)
    if spec.latent is not None:
        yield Kernel("norm", layers, 0, 2 * tokens * spec.latent.rank * 2)
    if spec.head_norms:
        numbers = tokens * (spec.num_heads + spec.num_kv_heads) / 2 * spec.head_dim
        yield Kernel("norm", 2 * layers, 0, 2 * numbers * 2)
    q = tokens * spec.num_heads * spec.head_dim * 2
    yield Kernel("rotation", layers, tokens * cached, 2 * q)
    windows = spec.windows or (None,) * layers
    for window in dict.fromkeys(windows):
        yield Kernel(
            "attention",
            windows.count(window),
            step.positions(window) * cached,
            q + tokens * spec.num_heads * spec.value_dim * 2,
            2 * spec.num_heads * (spec.head_dim + spec.value_dim) * step.pairs(window),
        )
    yield Kernel("merge", layers, 0, q)


def _mlps(spec: ModelSpec, form: Form, tokens: int) -> Iterator[Kernel]:
    hidden, mixture = spec.hidden_size, spec.mixture
    sparse = len(mixture.layers) if mixture else 0

    def gated(count: int, inner: int) -> Iterator[Kernel]:
        yield from _product("gate and up", count, hidden, 2 * inner, tokens, form)
        yield Kernel("gate", count, 0, 3 * tokens * inner * 2)
        yield from _product("down", count, inner, hidden, tokens, form)

    if sparse < spec.num_layers:
        yield from gated(spec.num_layers - sparse, spec.intermediate_size)
    if mixture is None:
        return
    yield from _product("router", sparse, hidden, mixture.num_experts, tokens, BF16)
    yield Kernel("choice", 2 * sparse)
    rows, read = tokens * mixture.num_chosen, mixture.num_experts * mixture.used(tokens)
    for name, inputs, outputs in (
        ("experts' gate and up", hidden, 2 * mixture.size),
        ("experts' down", mixture.size, hidden),
    ):
        if form.product == "fp8":
            yield Kernel("rounding", sparse, 0, 3 * rows * inputs)
        yield Kernel("order", sparse)
        yield Kernel(
            name,
            sparse,
            read * outputs * (inputs * form.expert + form.scale),
            rows * (inputs + outputs) * 2,
            2 * rows * inputs * outputs,
            form.product,
        )
    yield Kernel("gate", sparse, 0, 3 * rows * mixture.size * 2)
    yield Kernel("sum", sparse, 0, rows * hidden * 2)
    if mixture.shared_size:
        yield from gated(sparse, mixture.shared_size)


def floor_s(launches: Sequence[Kernel], bytes_per_s: float) -> float:
    """The least seconds by weights, keys and values alone."""
    return sum(each.count * each.streamed for each in launches) / bytes_per_s


def step_s(spec: ModelSpec, form: Form, step: Step, chip: Chip) -> float:
    """Predicted seconds of a step's work on the device."""
    return chip.graph_s + sum(each.seconds(chip) for each in kernels(spec, form, step))


def offline_rate(
    spec: ModelSpec, form: Form, chip: Chip, requests: Sequence[tuple[int, int]], chunk: int = 8192
) -> float:
    """Predicted output tokens per second when all requests (tokens in, tokens out) come at once:
    their prompts, then the decode steps of those that are left. The host's work is taken as
    hidden."""
    prompts = sum(prompt for prompt, _ in requests)
    mean = prompts // len(requests)
    chunks = prompts / chunk
    seconds = chunks * step_s(spec, form, Step(max(chunk // mean, 1), mean, mean), chip)
    stride = 16
    for done in range(1, max(out for _, out in requests), stride):
        left = [prompt for prompt, out in requests if out > done]
        length = sum(left) // len(left) + done + stride // 2
        seconds += stride * step_s(spec, form, Step(len(left), length), chip)
    return sum(out for _, out in requests) / seconds


def fits(spec: ModelSpec, form: Form, step: Step, chip: Chip) -> bool:
    """Whether the weights and the step's keys and values leave a tenth of the memory."""
    every = sum(k.count * k.streamed for k in kernels(spec, form, Step(4096, 1)))
    cache = step.rows * step.length * numbers_per_token(spec.cache_parts) * spec.num_layers
    return every + cache * form.kv < 0.9 * chip.memory


def spec_of(name: str, *, tiny: bool = False) -> ModelSpec:
    """The spec of one of the models of CONFIGS."""
    with tempfile.TemporaryDirectory() as folder:
        return read_spec(write_model(Path(folder), name, tiny=tiny))


def forms(name: str) -> tuple[Form, ...]:
    """The forms of a model in the table."""
    return (BF16, MXFP4) if name == GPT_OSS else (BF16, FP8)


def table() -> list[str]:
    """The table of docs/gpu.md."""
    lines = [
        f"| {TIMES} | " + " | ".join(chip.name for chip in CHIPS) + " |",
        "|---|" + "---|" * len(CHIPS),
    ]
    for name in CONFIGS:
        spec = spec_of(name)
        for form in forms(name):
            cells = [_cell(spec, form, chip) for chip in CHIPS]
            lines.append(f"| {name}, {form.name} | " + " | ".join(cells) + " |")
    return lines


def _cell(spec: ModelSpec, form: Form, chip: Chip) -> str:
    if not chip.rate(form.product):
        return "–"
    times = [
        f"{step_s(spec, form, step, chip) * 1e3:.3g}" if fits(spec, form, step, chip) else "–"
        for step in (*DECODE, PREFILL)
    ]
    return " / ".join(times)


def kernel_table(spec: ModelSpec, form: Form, chip: Chip) -> list[str]:
    """The kernels of the steps of the table, for one model on one chip."""
    lines = []
    for step in (*DECODE, PREFILL):
        what = f"{step.rows} rows" if step.new == 1 else f"{step.new} new tokens"
        lines += [
            f"{what} to position {step.length}: {step_s(spec, form, step, chip) * 1e3:.2f} ms",
            "",
            "| kernel | launches | MB | GFLOP | µs | limit |",
            "|---|---|---|---|---|---|",
        ]
        for each in kernels(spec, form, step):
            bounds = each.bounds(chip)
            limit = max(bounds, key=bounds.__getitem__)
            lines.append(
                f"| {each.name} | {each.count} | {each.moved(chip) / 1e6:.2f}"
                f" | {each.flops / 1e9:.2f} | {each.seconds(chip) / each.count * 1e6:.1f}"
                f" | {limit} |"
            )
        lines.append("")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=CONFIGS)
    parser.add_argument("--chip", choices=[chip.name for chip in CHIPS], default="H200")
    args = parser.parse_args()
    if args.model is None:
        print("\n".join(table()))
        return
    chip = next(chip for chip in CHIPS if chip.name == args.chip)
    for form in forms(args.model):
        print(f"{args.model}, {form.name}, {chip.name}\n")
        print("\n".join(kernel_table(spec_of(args.model), form, chip)))


if __name__ == "__main__":
    main()
