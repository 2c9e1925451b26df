"""Kernels at the sizes of five models, each as a share of what the machine reaches: the time that
its bytes take in a copy or its operations in a large product, divided by its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from gpu.models import CONFIGS, LLAMA_8B
from gpu.rates import measured
from gpu.results import Results
from gpu.roofline import BF16, DECODE, FP8, Form, Kernel, Step, kernels, spec_of
from gpu.timing import device, seconds_of

from setpoint.core.model import ModelSpec
from setpoint.core.plan import Admit
from setpoint.core.sampling import SamplingParams
from setpoint.engine.attention.attention_backend import (
    AttentionBatch,
    AttentionShape,
    AttentionVariant,
)
from setpoint.engine.attention.triton_attention import create as create_attention
from setpoint.engine.kernels.device_sampling import DeviceRows, Draws
from setpoint.engine.kernels.triton.triton_ops import TritonOps
from setpoint.engine.quant.grouped import TritonExperts
from setpoint.engine.quant.plain import PlainWeight
from setpoint.engine.quant.rounded import RoundedWeight
from setpoint.engine.sampling.columns import NUM_WORDS, SLOT_DTYPE, slot_values

PAGE = 16
EXTENDS = (Step(1, 8192, 8192), Step(4, 8192, 128))
"""A whole prompt, and a few tokens on long prefixes."""
E4M3 = torch.float8_e4m3fn
Case = tuple[Kernel, Callable[[], object]]


def sweeps(out: Results) -> None:
    """Measure every kernel of every model."""
    rates = measured(out)
    for name in CONFIGS:
        spec = spec_of(name, tiny=out.rehearsal)
        for step in _steps(DECODE, rehearsal=out.rehearsal):
            label = f"{name}, {step.rows} rows"
            _sweep(out, rates, label, lambda s=spec, t=step: _decode(s, t))
        for step in _steps(EXTENDS, rehearsal=out.rehearsal):
            label = f"{name}, {step.rows} × {step.new} tokens to {step.length}"
            _sweep(out, rates, label, lambda s=spec, t=step: _attention(s, t, BF16))
    llama = spec_of(LLAMA_8B, tiny=out.rehearsal)
    for step in _steps(DECODE, rehearsal=out.rehearsal):
        _sweep(out, rates, f"{LLAMA_8B} fp8, {step.rows} rows", lambda t=step: _fp8(llama, t))
        _sweep(out, rates, f"{LLAMA_8B}, {step.rows} rows", lambda t=step: _sampling(llama, t))


def _steps(steps: tuple[Step, ...], *, rehearsal: bool) -> tuple[Step, ...]:
    if not rehearsal:
        return steps
    step = min(steps, key=lambda each: each.tokens)
    return (replace(step, length=40, new=min(step.new, 4)),)


def _sweep(
    out: Results, rates: dict[str, float], label: str, cases: Callable[[], Iterator[Case]]
) -> None:
    def measure() -> None:
        for kernel, call in cases():
            seconds = seconds_of(call)
            least = max(
                (kernel.streamed + kernel.activations) / rates["memory"],
                kernel.flops / rates.get(kernel.product, rates["bf16"]),
            )
            out.add(
                f"{label}: {kernel.name}", 100 * least / seconds, "%", microseconds=seconds * 1e6
            )

    out.attempt(label, measure)


def _named(spec: ModelSpec, form: Form, step: Step, *names: str) -> list[Kernel]:
    return [each for each in kernels(spec, form, step) if each.name in names]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Small random numbers on the device; in 8 bits, bytes that are numbers."""
    if dtype.itemsize == 1:
        return torch.full(shape, 0x38, dtype=torch.uint8, device=device()).view(dtype)
    return torch.randn(shape, device=device(), dtype=dtype).mul_(0.1)


def _decode(spec: ModelSpec, step: Step) -> Iterator[Case]:
    yield from _attention(spec, step, BF16)
    yield from _norms(spec, step)
    if spec.mixture is not None:
        yield from _experts(spec, step)


def _attention(spec: ModelSpec, step: Step, form: Form) -> Iterator[Case]:
    kind = torch.bfloat16 if form is BF16 else E4M3
    shape = AttentionShape(
        spec.num_heads, spec.num_kv_heads, spec.head_dim, PAGE, torch.bfloat16, kind, device(),
        spec.value_dim,
    )  # fmt: skip
    backend, batch = create_attention(shape), _batch(step)
    pages = int(batch.page_table.max()) + 1
    keys = empty(pages, PAGE, spec.num_kv_heads, spec.head_dim, dtype=kind)
    values = keys[..., : spec.value_dim] if spec.latent else torch.empty_like(keys).copy_(keys)
    q = empty(step.tokens, spec.num_heads, spec.head_dim)
    has_sinks = spec.model_type == "gpt_oss"
    sinks = torch.zeros(spec.num_heads, device=device()) if has_sinks else None
    windows = dict.fromkeys(spec.windows or (None,))
    for kernel, window in zip(_named(spec, form, step, "attention"), windows, strict=True):
        variant = AttentionVariant(spec.head_dim**-0.5, window=window, sinks=sinks)
        name = "attention" if window is None else f"attention, window {window}"

        def attend(variant: AttentionVariant = variant) -> torch.Tensor:
            return backend.forward(q, keys, values, batch, variant)

        backend.prepare(batch)
        attend()  # plans for the window
        yield replace(kernel, name=name), attend


def _batch(step: Step) -> AttentionBatch:
    """Rows on pages in random order."""
    pages = -(-step.length // PAGE)
    table = torch.randperm(step.rows * pages, device=device()).int().view(step.rows, pages) + 1
    lengths = np.full(step.rows, step.length, np.int32)
    counts = np.arange(step.rows + 1, dtype=np.int32) * step.new
    unused = torch.zeros(step.tokens, dtype=torch.int64, device=device())
    cu_q, kv_lens = (torch.from_numpy(each).to(device()) for each in (counts, lengths))
    slots = torch.arange(step.rows, dtype=torch.int32, device=device())
    return AttentionBatch(unused, unused, cu_q, counts, kv_lens, lengths, slots, table)


def _norms(spec: ModelSpec, step: Step) -> Iterator[Case]:
    ops, x = TritonOps(), empty(step.tokens, spec.hidden_size)
    residual, weight = torch.empty_like(x).copy_(x), empty(spec.hidden_size)
    norm, *_ = _named(spec, BF16, step, "norm")
    yield norm, lambda: ops.add_rms_norm(x, residual, weight, 1e-5)
    both = empty(step.tokens, 2 * spec.intermediate_size)
    gate = Kernel("gate", 1, activations=3 * step.tokens * spec.intermediate_size * 2)
    yield gate, lambda: ops.silu_mul(both)


def _experts(spec: ModelSpec, step: Step) -> Iterator[Case]:
    """Tokens that choose at random; the kernel's bytes are those of the experts that they use."""
    mixture = spec.mixture
    assert mixture is not None
    scores = torch.rand(step.tokens, mixture.num_experts, device=device())
    ids = scores.topk(mixture.num_chosen).indices.int().contiguous()
    names = "experts' gate and up", "experts' down"
    for kernel in _named(spec, BF16, step, *names):
        down = kernel.name == names[1]
        inputs = mixture.size if down else spec.hidden_size
        outputs = spec.hidden_size if down else 2 * mixture.size
        stacked = empty(mixture.num_experts, outputs, inputs)
        experts = TritonExperts([PlainWeight(each, None) for each in stacked])
        x = empty(step.tokens * (mixture.num_chosen if down else 1), inputs)
        yield kernel, lambda experts=experts, x=x: experts(x, ids)


def _fp8(spec: ModelSpec, step: Step) -> Iterator[Case]:
    """Products in fp8 with the rounding before them, rounding alone, and an fp8 cache."""
    yield from _attention(spec, step, FP8)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    for kernel, (inputs, outputs) in zip(
        _named(spec, FP8, step, "gate and up", "down"),
        ((hidden, 2 * inner), (inner, hidden)),
        strict=True,
    ):
        scales = torch.ones(outputs, 1, device=device())
        weight = RoundedWeight(empty(outputs, inputs, dtype=E4M3), scales, None)
        x = empty(step.tokens, inputs)
        rounding = Kernel("rounding", 1, activations=3 * step.tokens * inputs)
        yield replace(kernel, name=f"rounding and {kernel.name}"), lambda w=weight, x=x: w(x)
        yield (
            replace(rounding, name=f"rounding before {kernel.name}"),
            lambda w=weight, x=x: w.rounding(x),
        )


def _sampling(spec: ModelSpec, step: Step) -> Iterator[Case]:
    """Greedy rows, draws from whole distributions, and from what top-k and top-p leave."""
    ops, rows, vocabulary = TritonOps(), step.rows, spec.vocab_size
    logits = empty(rows, vocabulary) * 30
    read = Kernel("", 1, rows * vocabulary * 2)
    yield replace(read, name="best token"), lambda: ops.best_tokens(logits)
    for name, draws, sampling in (
        ("draw", Draws.WHOLE, SamplingParams()),
        ("draw of top-k and top-p", Draws.TRUNCATED, SamplingParams(top_k=50, top_p=0.9)),
    ):
        admits = (Admit(i, i, np.zeros(8, np.int32), 8, sampling, seed=i) for i in range(rows))
        columns = np.array([slot_values(each) for each in admits], SLOT_DTYPE)
        parameters = torch.from_numpy(columns.view(np.int32).reshape(rows, NUM_WORDS))
        places = torch.arange(rows, dtype=torch.int32, device=device()) * 16 + 8
        known = torch.zeros(rows, 16, dtype=torch.int32, device=device())
        given = DeviceRows(parameters.to(device()), places, known, None)
        yield (
            replace(read, name=name),
            lambda given=given, draws=draws: ops.sampling.choose(logits, given, draws),
        )
