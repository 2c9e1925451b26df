"""Whether a model can fit, before anything of it is loaded; and if not, what would fit here.

A refusal must be certain, so it counts only what no start can do without. Advice must hold, so it
comes from the whole memory plan. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from setpoint.core.errors import OutOfMemoryError
from setpoint.core.model import KeptBlocks
from setpoint.planning.memory import MemoryModel, format_bytes

GGUF_BITS = 4.85
"""Bits per weight of a GGUF file in Q4_K_M
(https://github.com/ggml-org/llama.cpp/blob/master/tools/quantize/README.md)."""
WORKSPACE_SHARE = 0.5
"""The share of the estimated workspace that a step certainly needs."""
USEFUL_TOKENS = 2048
"""Advice leaves room for this many tokens, or for a whole context if that is shorter."""
MOST_OF_MEMORY = 0.95
"""The largest --mem-fraction-static that is advised."""
WEIGHTS_SHARE = 0.9
"""The share of the memory for weights and KV cache that the weights of an advised model take."""
LEAST_CONTEXT = 512
LEAST_PARAMETERS = 10**6
BF16_BYTES = 2


@dataclass(slots=True, frozen=True)
class Choices:
    """What could be chosen otherwise for this model on this machine."""

    int8: bool
    """--quantization w8a8_int8 works here."""
    gguf: bool
    """Models of this family are served from GGUF files here."""


def check_fit(
    model: MemoryModel, available_bytes: int, *, name: str, is_stored: bool, choices: Choices
) -> None:
    """Raise OutOfMemoryError if the model certainly does not fit into the memory that is available
    now. is_stored: its parameters were counted in files, not computed from its dimensions."""
    weights, kv = _least_weights(model, is_stored=is_stored), _least_kv(model)
    static = round(available_bytes * model.mem_fraction_static)
    work = 0
    if model.device == "cpu":  # a GPU's workspace comes out of the rest
        work = round(WORKSPACE_SHARE * model.workspace(model.page_size))
    if weights + kv <= static and weights + kv + work <= available_bytes:
        return
    parts = [
        f"its weights need {format_bytes(weights)} ({_count(model.spec.num_parameters)}"
        " parameters)",
        f"the smallest KV cache {format_bytes(kv)}",
        *([f"a step {format_bytes(work)}"] if work else []),
    ]
    advice = "; ".join(_advice(model, available_bytes, choices))
    raise OutOfMemoryError(
        f"{name} does not fit into the memory: {', '.join(parts)}; {format_bytes(available_bytes)}"
        f" are available, of which weights and KV cache may take {format_bytes(static)}"
        f" (--mem-fraction-static {model.mem_fraction_static:g})."
        f" {f'What would fit here: {advice}' if advice else 'Nothing would fit here: free memory'}."
    )


def _least_weights(model: MemoryModel, *, is_stored: bool) -> int:
    """No start of the model takes less for its weights."""
    spec = model.spec
    least = replace(model, head_copied=False).weights()
    if is_stored:
        return least
    # Computed with three matrices in each MLP; a family without gates has two. And some families
    # tie the head to the embeddings without a word in their configs.
    doubtful = spec.num_layers * spec.hidden_size * spec.intermediate_size
    if not spec.tie_embeddings and "tie_word_embeddings" not in spec.config:
        doubtful += spec.vocab_size * spec.hidden_size
    width = 1 if model.quantization == "w8a8_int8" else model.dtype_bytes
    return max(least - doubtful * width, 0)


def _least_kv(model: MemoryModel) -> int:
    """One page for each cache group, and the dummy page."""
    layout = model.layout
    return (len(layout.groups) + 1) * layout.page_bytes(model.page_size, model.kv_element_bytes)


def _advice(model: MemoryModel, available: int, choices: Choices) -> Iterator[str]:
    for words, other in _others(model, choices):
        if _fits(other, available):
            yield f"{words} ({format_bytes(other.weights())} of weights)"
    fraction = model.mem_fraction_static
    while (fraction := round(fraction + 0.01, 2)) <= MOST_OF_MEMORY:
        if _fits(replace(model, mem_fraction_static=fraction), available):
            yield f"--mem-fraction-static {fraction:g}"
            break
    context = model.context_len
    while (context := context // 2) >= LEAST_CONTEXT:
        if _fits(replace(model, context_len=context), available):
            yield f"--context-length {context}"
            break
    static = available * model.mem_fraction_static - _least_kv(model)
    largest = int(max(static, 0) * WEIGHTS_SHARE / BF16_BYTES)
    if largest >= LEAST_PARAMETERS:
        yield f"a model of about {_count(largest)} parameters in bfloat16"


def _others(model: MemoryModel, choices: Choices) -> Iterator[tuple[str, MemoryModel]]:
    """The same model in fewer bytes."""
    narrow = replace(
        model,
        dtype_bytes=min(model.dtype_bytes, BF16_BYTES),
        kv_element_bytes=min(model.kv_element_bytes, BF16_BYTES),
    )
    if narrow != model:
        yield "--dtype bfloat16", narrow
    is_plain = model.quantization in (None, "unquant") and model.spec.blocks is None
    if choices.int8 and is_plain:
        yield "--quantization w8a8_int8", replace(narrow, quantization="w8a8_int8")
    if choices.gguf and is_plain:
        num_bytes = round(model.spec.num_parameters * GGUF_BITS / 8)
        blocks = KeptBlocks(model.spec.num_parameters, num_bytes, num_bytes, ("Q4_K",), num_bytes)
        spec = replace(model.spec, blocks=blocks)
        yield "a GGUF file of it with 4 bits (Q4_K_M)", replace(narrow, spec=spec, blocks_kept=True)


def _fits(model: MemoryModel, available: int) -> bool:
    """Whether there is room for the model and some use of it, by the whole plan."""
    try:
        plan = model.plan(available)
    except OutOfMemoryError:
        return False
    return plan.pool_tokens >= min(model.context_len, USEFUL_TOKENS)


def _count(number: int) -> str:
    """A number of parameters, in the unit that people use."""
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if number >= size:
            return f"{number / size:.{0 if number >= 10 * size else 1}f} {unit}"
    return str(number)
