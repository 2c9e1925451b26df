"""Settles what follows from the machine: the size of a step, memory, threads, the attention
backend.

Each function settles its option in the Book, with the reason, and returns what other functions need
of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from setpoint.config.decisions import Book, Decision
from setpoint.config.hardware import Hardware
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError
from setpoint.planning.memory import CPU_MEM_FRACTION, GIB, auto_mem_fraction, format_bytes

CPU_CHUNK = 512
"""Prompt tokens per step: the fastest size measured, 4 % faster than 2048, and the first requests
of a burst are answered sooner (docs/notebook.md)."""
GPU_CHUNKS = ((20, 2048), (60, 4096), (160, 8192))
"""(GiB, tokens): with less GPU memory than this, this many tokens in a prefill step; 16384 with
more (docs/sglang/options.md#prefill-step)."""


@dataclass(slots=True, frozen=True)
class Steps:
    """Settled values that other functions need and that no option holds as such."""

    chunk: int
    """Prompt tokens of a step; -1 if prompts are not split."""
    overlap_depth: int
    decode_after_piece: int
    decisions: tuple[Decision, Decision]
    """The decisions about ``overlap_depth`` and ``decode_after_piece``."""


def settle_steps(book: Book, hardware: Hardware, device: str) -> Steps:
    """Settle all options of this module. Raises ConfigError for what the machine cannot do."""
    chunk = _chunked_prefill_size(book, hardware, device)
    step_tokens = chunk if chunk > 0 else book.options.max_prefill_tokens
    _mem_fraction(book, hardware, device, step_tokens=step_tokens)
    _attention_backend(book, device)
    _num_threads(book, hardware)
    depth, why_depth = _overlap_depth(book.options, device)
    piece, why_piece = _decode_after_piece(book, device, chunk)
    decisions = (
        Decision("overlap_depth", depth, why_depth),
        Decision("decode_after_piece", piece, why_piece),
    )
    return Steps(chunk, depth, piece, decisions)


def _chunked_prefill_size(book: Book, hardware: Hardware, device: str) -> int:
    asked, page = book.options.chunked_prefill_size, book.options.page_size
    if asked is not None:
        return (
            asked
            if asked > 0
            else book.put("chunked_prefill_size", -1, "given: prompts are not split")
        )
    if device == "cpu":
        size, why = (
            CPU_CHUNK,
            "the fastest measured on a CPU, whose matrix products are busy from 256 tokens on",
        )
    elif hardware.gpu_bytes is None:
        size, why = 4096, "the size of the GPU's memory is not known"
    else:
        size = next(
            (tokens for below, tokens in GPU_CHUNKS if hardware.gpu_bytes < below * GIB), 16384
        )
        why = f"by the GPU's {format_bytes(hardware.gpu_bytes)}"
    if size % page:
        size, why = max(size // page, 1) * page, f"{why}, in whole pages"
    return book.put("chunked_prefill_size", size, why)


def _decode_after_piece(book: Book, device: str, chunk: int) -> tuple[int, str]:
    if book.options.prefill_decode_interval is not None:
        return 0, "--prefill-decode-interval is given"
    book.put("prefill_decode_interval", 0, "prefill goes first")
    if device != "cpu":
        return 0, "a GPU computes a long prompt before the pause is noticeable"
    if book.options.enable_mixed_chunk and chunk > 0:
        return (
            0,
            (
                "every chunk of a prompt computes a token for each running request anyway"
                " (--enable-mixed-chunk)"
            ),
        )
    return (
        1,
        (
            "a chunk takes long on a CPU: a decode step between those of a long prompt, or no"
            " stream would have a token until its end"
        ),
    )


def _mem_fraction(book: Book, hardware: Hardware, device: str, *, step_tokens: int) -> None:
    if device == "cpu":
        book.fill(
            "mem_fraction_static",
            CPU_MEM_FRACTION,
            "weights and KV pool; the rest is for a step's workspace and the machine",
        )
    elif hardware.gpu_bytes is None:
        book.fill("mem_fraction_static", 0.95, "the size of the GPU's memory is not known")
    else:
        value = auto_mem_fraction(hardware.gpu_bytes, step_tokens=step_tokens)
        if value <= 0:
            raise ConfigError(
                f"a GPU of {format_bytes(hardware.gpu_bytes)} has no room for steps of"
                f" {step_tokens} tokens; lower --chunked-prefill-size (without chunking"
                " --max-prefill-tokens), or give --mem-fraction-static."
            )
        book.fill(
            "mem_fraction_static",
            value,
            f"what steps of {step_tokens} tokens leave of {format_bytes(hardware.gpu_bytes)}",
        )


def _attention_backend(book: Book, device: str) -> None:
    asked = book.options.attention_backend
    if asked == "cpu" and device != "cpu":
        raise ConfigError(
            f"--attention-backend cpu does not run on --device {device}; use torch_ref, or leave it"
            " open."
        )
    if asked == "torch_native":
        book.put(
            "attention_backend",
            "torch_ref",
            "SGLang's name torch_native means attention in plain torch, which is called so here",
        )
    if asked == "auto":
        book.put(
            "attention_backend",
            asked,
            "the engine takes the best one that runs here, and says which",
        )


def _num_threads(book: Book, hardware: Hardware) -> None:
    asked, cores = book.options.num_threads, hardware.num_cores
    book.fill("num_threads", cores, "the cores this process may use, by affinity and cgroup quota")
    if asked is not None and asked > cores:
        book.put(
            "num_threads",
            asked,
            f"given, but only {cores} cores may be used: threads will wait for each other",
            warn=True,
        )


def _overlap_depth(options: Options, device: str) -> tuple[int, str]:
    if device == "cpu":
        return 0, "on a CPU, planning ahead would take the cores from the step itself"
    if options.disable_overlap_schedule:
        return 0, "--disable-overlap-schedule"
    return 1, "the next step is planned while the GPU computes this one"
