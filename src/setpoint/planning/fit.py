"""Checks before loading whether a model can fit into memory; if not, says what would fit here.

A refusal must be certain, so it counts only what every start needs. Advice must work, so it comes
from the whole memory plan. Pure arithmetic.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace

from setpoint.core.errors import OutOfMemoryError
from setpoint.core.model import ROUNDED, KeptBlocks
from setpoint.planning.memory import USEFUL_TOKENS, MemoryModel, format_bytes

GGUF_BITS = 4.85
"""Bits per weight of a GGUF file in Q4_K_M
(https://github.com/ggml-org/llama.cpp/blob/master/tools/quantize/README.md)."""
GGUF_FILE = "a GGUF file with 4 bits (Q4_K_M)"
FEWER_BITS = 1.1
"""Such a file is advised for weights that take this many times its bytes."""
WORKSPACE_SHARE = 0.5
"""Share of the estimated workspace that a step certainly needs."""
WEIGHTS_SHARE = 0.9
"""Share of the memory for weights and KV cache that the weights of an advised model take."""
LEAST_CONTEXT = 512
"""Advised contexts are multiples of it."""
LEAST_PARAMETERS = 10**6
BF16_BYTES = 2
WIDER = 1.2
"""Blocks that take this many times their bytes in the file are worth a word."""


@dataclass(slots=True, frozen=True)
class Choices:
    """The alternatives that exist for this model on this machine."""

    int8: bool
    """--quantization w8a8_int8 works here."""
    gguf: bool
    """Models of this family are served from GGUF files here."""
    blocks: bool
    """Quantized blocks of the checkpoint stay as they are here, if --quantization allows it."""
    divided: tuple[tuple[str, MemoryModel], ...] = ()
    """(option in words, what one memory needs), for each way to divide the model among several."""


def check_fit(
    model: MemoryModel,
    available_bytes: int,
    *,
    name: str,
    is_counted: bool,
    choices: Choices,
    num_ranks: int = 1,
) -> None:
    """Raise OutOfMemoryError if the model certainly does not fit into the memory that is available
    now. is_counted: the number of its parameters is exact, either counted in files or computed from
    the dimensions of a family whose matrices are known. num_ranks: number of ranks that share this
    memory; ``model`` is what they need together."""
    weights, kv = _least_weights(model, is_counted=is_counted), _least_kv(model)
    static = round(available_bytes * model.mem_fraction_static)
    work = 0
    if model.device == "cpu":  # a GPU's workspace comes out of the rest
        work = round(WORKSPACE_SHARE * model.workspace(model.page_size))
    if weights + kv <= static and weights + kv + work <= available_bytes:
        return
    parts = [
        f"its weights need {format_bytes(weights)} ({_count(model.spec.num_parameters)}"
        f" parameters{_wider(model)})",
        f"the smallest KV cache {format_bytes(kv)}",
        *([f"a step {format_bytes(work)}"] if work else []),
    ]
    ranks = f" (for all {num_ranks} ranks together)" if num_ranks > 1 else ""
    advice = "; ".join(_advice(model, available_bytes, choices))
    raise OutOfMemoryError(
        f"{name} does not fit into the memory: {', '.join(parts)}{ranks};"
        f" {format_bytes(available_bytes)}"
        f" are available, of which weights and KV cache may take {format_bytes(static)}"
        f" (--mem-fraction-static {model.mem_fraction_static:g})."
        f" {f'What would fit here: {advice}' if advice else 'Nothing would fit here: free memory'}."
    )


def _least_weights(model: MemoryModel, *, is_counted: bool) -> int:
    """Bytes of the weights that every start of the model takes at least."""
    spec = model.spec
    least = replace(model, head_copied=False).weights()
    if is_counted:
        return least
    # The number was computed with three matrices in each MLP; a family without gates has two. Some
    # families tie the head to the embeddings although their configs do not say so.
    doubtful = spec.num_layers * spec.hidden_size * spec.intermediate_size
    if not spec.tie_embeddings and "tie_word_embeddings" not in spec.config:
        doubtful += spec.vocab_size * spec.hidden_size
    width = 1 if model.quantization in ROUNDED else model.dtype_bytes
    return max(least - doubtful * width, 0)


def _wider(model: MemoryModel) -> str:
    """Why the weights take clearly more memory than their file has bytes; "" if they do not."""
    kept = model.spec.blocks if model.blocks_kept else None
    if kept is None or kept.held_bytes <= WIDER * kept.num_bytes:
        return ""
    return (
        f"; blocks of {' and '.join(kept.kinds)} take more memory than the"
        f" {format_bytes(kept.num_bytes)} that they have in the file"
    )


def _least_kv(model: MemoryModel) -> int:
    """Bytes of one page for each cache group and of the dummy page."""
    layout = model.layout
    return (len(layout.groups) + 1) * layout.page_bytes(model.page_size, model.kv_element_bytes)


def _advice(model: MemoryModel, available: int, choices: Choices) -> Iterator[str]:
    for words, other in _others(model, choices):
        if _fits(other, available):
            yield f"{words} ({format_bytes(other.weights())} of weights)"
    for words, part in choices.divided:
        if _fits(part, available):
            yield f"{words} ({format_bytes(part.weights())} of weights on each)"
            break
    share = model.share_with_room(available, available - model.weights())
    if (
        share is not None
        and share > model.mem_fraction_static
        and _fits(replace(model, mem_fraction_static=share), available)
    ):
        yield f"--mem-fraction-static {share:g}"
    contexts = range(LEAST_CONTEXT, model.context_len, LEAST_CONTEXT)
    num_fitting = bisect.bisect_left(
        contexts,
        True,
        key=lambda context: not _fits(replace(model, context_len=context), available),
    )
    if num_fitting:
        yield f"--context-length {contexts[num_fitting - 1]}"
    static = available * model.mem_fraction_static - _least_kv(model)
    sizes = [
        (int(max(static, 0) * WEIGHTS_SHARE / width), kind)
        for width, kind in _weight_kinds(model, choices)
    ]
    (largest, kind), *more = sizes
    if largest >= LEAST_PARAMETERS:
        first = f"a model of about {_count(largest)} parameters {kind}"
        others = [f"of about {_count(number)} {kind}" for number, kind in more]
        yield f"{', '.join([first, *others[:-1]])}, or {others[-1]}" if others else first


def _weight_kinds(model: MemoryModel, choices: Choices) -> Iterator[tuple[float, str]]:
    """(bytes per parameter, words) of weights that other models may have: first as the options and
    the file ask for them, then what takes fewer bytes."""
    own = model.weights() / model.spec.num_parameters
    if model.spec.blocks is not None and model.blocks_kept:
        yield own, f"with as many bits for each ({8 * own:.1f} in memory)"
    elif model.quantization in ROUNDED and model.spec.blocks is None:
        yield own, f"with --quantization {model.quantization}"
    else:
        wide = model.dtype_bytes > BF16_BYTES
        yield (model.dtype_bytes, "in float32") if wide else (BF16_BYTES, "in bfloat16")
    if choices.int8 and _is_unquantised(model):
        int8 = replace(model, quantization="w8a8_int8")
        yield int8.weights() / model.spec.num_parameters, "with --quantization w8a8_int8"
    if choices.gguf and own > FEWER_BITS * GGUF_BITS / 8:
        yield GGUF_BITS / 8, f"in {GGUF_FILE}"


def _others(model: MemoryModel, choices: Choices) -> Iterator[tuple[str, MemoryModel]]:
    """(option or file in words, the same model with it), for everything that takes fewer bytes."""
    narrow = replace(
        model,
        dtype_bytes=min(model.dtype_bytes, BF16_BYTES),
        kv_element_bytes=min(model.kv_element_bytes, BF16_BYTES),
    )
    if narrow != model:
        yield "--dtype bfloat16", narrow
    if choices.int8 and _is_unquantised(model):
        yield "--quantization w8a8_int8", replace(narrow, quantization="w8a8_int8")
    least = model.weights()
    if choices.blocks and model.spec.blocks is not None and not model.blocks_kept:
        kept = replace(narrow, quantization=None, blocks_kept=True)
        words = [f"without --quantization {model.quantization}"] if model.quantization else []
        words += ["with --dtype bfloat16"] if narrow.dtype_bytes != model.dtype_bytes else []
        if words:
            least = kept.weights()
            yield f"the blocks of the file as they are, {' and '.join(words)}", kept
    if choices.gguf:
        num_bytes = round(model.spec.num_parameters * GGUF_BITS / 8)
        blocks = KeptBlocks(model.spec.num_parameters, num_bytes, num_bytes, ("Q4_K",), num_bytes)
        spec = replace(model.spec, blocks=blocks)
        four = replace(narrow, spec=spec, quantization=None, blocks_kept=True)
        if least > FEWER_BITS * four.weights():
            yield GGUF_FILE.replace("file", "file of it"), four


def _is_unquantised(model: MemoryModel) -> bool:
    return model.quantization in (None, "unquant") and model.spec.blocks is None


def _fits(model: MemoryModel, available: int) -> bool:
    """Whether the memory plan has room for the model and for USEFUL_TOKENS."""
    try:
        plan = model.plan(available)
    except OutOfMemoryError:
        return False
    return plan.pool_tokens >= min(model.context_len, USEFUL_TOKENS)


def _count(number: int) -> str:
    """A number of parameters in words: "7.1 billion"."""
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if number >= size:
            return f"{number / size:.{0 if number >= 10 * size else 1}f} {unit}"
    return str(number)
