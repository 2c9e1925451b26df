"""Settles what follows from the model and its files: device, dtypes, quantization, context.

Each function settles its option in the Book, with the reason, and returns what other functions need
of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from setpoint.config.decisions import Book, Decision
from setpoint.config.environment import EnvSettings
from setpoint.config.hardware import Hardware
from setpoint.config.options import Options
from setpoint.config.resolved import DTYPE_BYTES
from setpoint.core.errors import ConfigError
from setpoint.core.model import ModelSpec

BODY_BYTES_PER_TOKEN = 16
MIN_BODY_BYTES = 4 << 20

_LONG_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp32": "float32"}


def settle_model(book: Book, model: ModelSpec, hardware: Hardware, env: EnvSettings) -> str:
    """Settle all options of this module, and return the device. Raises ConfigError for what the
    model cannot do."""
    device = _device(book, hardware)
    dtype = _dtype(book, model, device)
    _model_impl(book)
    _quantization(book, model, device, dtype)
    _kv_cache_dtype(book, dtype)
    _context_length(book, model, env)
    _max_body_bytes(book)
    return device


def _device(book: Book, hardware: Hardware) -> str:
    if book.options.device != "auto":
        return book.options.device
    if hardware.device == "cuda":
        return book.put("device", "cuda", "an NVIDIA GPU is visible and torch can drive it")
    return book.put("device", "cpu", "no NVIDIA GPU that torch can drive")


def _model_impl(book: Book) -> None:
    asked = book.options.model_impl
    if asked == "sglang":
        book.put("model_impl", "setpoint", "given as sglang")
    elif asked == "auto":
        book.put(
            "model_impl",
            asked,
            "Setpoint's own code for the model if there is any, otherwise that of the transformers"
            " library; the log names the one in use",
        )


def keeps_blocks(options: Options) -> bool:
    """Whether a GGUF's blocks stay as they are under these settled options."""
    return options.quantization is None and _blocks_run(
        options.device, options.dtype, options.model_impl
    )


def _blocks_run(device: str, dtype: str, model_impl: str) -> bool:
    """Whether a GGUF's blocks can be multiplied as they are here."""
    return device == "cpu" and dtype == "bfloat16" and model_impl != "transformers"


def _quantization(book: Book, model: ModelSpec, device: str, dtype: str) -> None:
    asked = book.options.quantization
    if asked == "w8a8_int8" and device != "cpu":
        raise ConfigError(
            f"--quantization w8a8_int8 does not run on --device {device}; drop it, or use --device"
            " cpu."
        )
    if asked is not None:
        return
    if model.blocks is None:
        why = "weights as the checkpoint has them"
    elif _blocks_run(device, dtype, book.get("model_impl")):
        kinds = " and ".join(model.blocks.kinds)
        why = (
            f"the GGUF's {kinds} blocks multiplied as they are, with the results of bfloat16;"
            " unquant dequantises them at load"
        )
    else:
        why = (
            "the GGUF's blocks dequantised at load; they are multiplied as they are in bfloat16 on"
            " a CPU, by models of this engine"
        )
    book.put("quantization", None, why)


def _dtype(book: Book, model: ModelSpec, device: str) -> str:
    asked = book.options.dtype
    if asked in _LONG_DTYPES:
        return book.put("dtype", _LONG_DTYPES[asked], f"given as {asked}")
    if asked != "auto":
        return asked
    if model.dtype == "float32":
        return book.put(
            "dtype",
            "bfloat16",
            "half the memory traffic of the checkpoint's float32; --dtype float32 keeps that",
        )
    if model.dtype == "float16" and device == "cpu":
        return book.put("dtype", "bfloat16", "the checkpoint is float16, which CPUs compute slowly")
    if model.dtype not in DTYPE_BYTES:
        return book.put(
            "dtype", "bfloat16", f"the checkpoint's {model.dtype} is not a type to compute in"
        )
    return book.put("dtype", model.dtype, "the checkpoint's own")


def _kv_cache_dtype(book: Book, dtype: str) -> None:
    asked = book.options.kv_cache_dtype
    if asked == "auto":
        book.put("kv_cache_dtype", dtype, "the same as dtype")
    elif asked in _LONG_DTYPES:
        book.put("kv_cache_dtype", _LONG_DTYPES[asked], f"given as {asked}")


def _context_length(book: Book, model: ModelSpec, env: EnvSettings) -> None:
    asked = book.options.context_length
    if asked is None:
        book.put("context_length", model.context_len, "the model's own limit")
    elif asked > model.context_len:
        if not env.allow_longer_context:
            raise ConfigError(
                f"--context-length {asked} is more than the {model.context_len} tokens this model"
                " was made for; lower it, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 if"
                " you know that the model stays sensible beyond."
            )
        book.put(
            "context_length", asked, f"given, beyond the model's own {model.context_len}", warn=True
        )


def _max_body_bytes(book: Book) -> None:
    """Leave room for every token of the context: one takes 4 to 5 bytes as prose, up to 8 as an id,
    and 6 to 12 as a character that the client's JSON library escapes."""
    of_a_prompt = BODY_BYTES_PER_TOKEN * book.get("context_length")
    if of_a_prompt > MIN_BODY_BYTES:
        book.fill(
            "max_body_bytes",
            of_a_prompt,
            f"{BODY_BYTES_PER_TOKEN} bytes for each token of the context",
        )
    else:
        book.fill(
            "max_body_bytes",
            MIN_BODY_BYTES,
            "holds a prompt of the whole context, and long lists of prompts",
        )


def about_the_model(book: Book, model: ModelSpec) -> Iterator[Decision]:
    """Decisions about properties of the model that no option covers."""
    if model.rope_by_context:
        why = (
            "keys in the cache are shared, so positions are rotated for this length in every"
            " sequence; a lower one suits short ones better"
        )
        yield Decision("rope_context_length", book.get("context_length"), why, told=True)
    if model.wrapper:
        why = f"{model.wrapper} takes more than text; its other parts are not loaded"
        yield Decision("language_model_only", model.architecture, why, told=True)
    if model.pooling is not None:
        yield Decision("embedding_pooling", model.pooling.kind, model.pooling.why, told=True)
        yield Decision("embedding_normalize", model.pooling.normalize, model.pooling.why, told=True)
