"""Settles ``--quantization``, and says whether the blocks of a file stay as they are."""

from __future__ import annotations

from setpoint.config.decisions import Book
from setpoint.config.options import Options
from setpoint.core.cache_scales import OPTION, scales_in_file
from setpoint.core.errors import ConfigError
from setpoint.core.model import BLOCKS_INT8, INT8_KINDS, ROUNDED, W8A8, ModelSpec
from setpoint.core.quantised import QUANTIZATIONS, method_of


def keeps_blocks(options: Options, model: ModelSpec) -> bool:
    """Whether the model's quantized blocks stay as they are with these settled options."""
    stored = options.model.load_format != "dummy"
    return (
        stored
        and options.model.quantization in (None, BLOCKS_INT8)
        and _blocks_run(
            model, options.execution.device, options.model.dtype, options.model.model_impl
        )
    )


def _blocks_run(model: ModelSpec, device: str, dtype: str, model_impl: str) -> bool:
    """Whether the model's quantized blocks can be multiplied without dequantizing them first."""
    on_gpu = model.blocks is not None and set(model.blocks.kinds) == {"FP8"}
    runs = device == "cpu" or (device == "cuda" and on_gpu)
    return runs and dtype == "bfloat16" and model_impl != "transformers"


def settle_quantization(book: Book, model: ModelSpec, device: str, dtype: str) -> None:
    """Settle ``--quantization``. Raises ConfigError if it cannot be honoured."""
    asked, given = book.options.model.quantization, ""
    runs = _blocks_run(model, device, dtype, book.get("model_impl"))
    if _is_of_folder(asked, model, runs=runs):
        asked, given = None, f"given as {asked}, which is what the folder has; "
    if asked == BLOCKS_INT8:
        _blocks_int8(book, model, device, dtype)
    if asked is not None:
        return
    if model.blocks is None:
        why = "weights stay as they are in the checkpoint"
        if model.quantised:
            why = "the codes of the folder are dequantized at load"
    elif runs and device != "cpu":
        why = (
            "the FP8 codes of the folder are multiplied as they are by activations that are rounded"
            " to 8 bits; unquant dequantizes them at load"
        )
    elif runs:
        kinds = " and ".join(model.blocks.kinds)
        as_asked = " or, of W8A8, as the folder asks" if W8A8 in model.blocks.kinds else ""
        whose = "folder's codes" if model.quantised else "file"
        why = (
            f"the {kinds} blocks of the {whose} are multiplied as they are, with the same"
            f" results as in bfloat16{as_asked}; unquant dequantizes them at load"
        )
    else:
        whose = "codes of the folder" if model.quantised else "blocks of the file"
        why = (
            f"the {whose} are dequantized at load; only Setpoint's own models in"
            " bfloat16 on a CPU multiply them as they are, and on a GPU if all are FP8"
        )
    book.put("quantization", None, given + why)


def _is_of_folder(asked: str | None, model: ModelSpec, *, runs: bool) -> bool:
    """Whether --quantization only names what the folder is. runs: its blocks stay as they are.
    Raises ConfigError if it names another kind of folder."""
    if asked == "w8a8_int8":
        return runs and model.blocks is not None and W8A8 in model.blocks.kinds
    if not any(asked in names for names in QUANTIZATIONS.values()):
        return False
    method = method_of(model.config)
    if asked in ROUNDED and not method and model.blocks is None:
        return False
    if asked in QUANTIZATIONS.get(method, ()):
        return True
    rounded = f"use {' or '.join(ROUNDED)}, which round weights to 8 bits at load, or leave it out"
    if method or model.blocks is not None:
        instead = "leave --quantization out"
        has = f"has {method} weights" if method else "has the quantized blocks of a GGUF file"
    else:
        instead, has = rounded, "is not quantized"
    raise ConfigError(
        f"--quantization {asked} is for folders whose weights were quantized that way, and this"
        f" model {has}; {instead}."
    )


def _blocks_int8(book: Book, model: ModelSpec, device: str, dtype: str) -> None:
    kinds = model.blocks.kinds if model.blocks else ()
    rounded = [kind for kind in kinds if kind in INT8_KINDS]
    if not rounded:
        has = f"only {' and '.join(kinds)} blocks" if kinds else "no quantized blocks"
        raise ConfigError(
            f"--quantization {BLOCKS_INT8} multiplies {', '.join(sorted(INT8_KINDS))} blocks of a"
            f" GGUF file or quantized folder by activations of 8 bits, and this model has {has};"
            " leave it out, or use w8a8_int8."
        )
    if device != "cpu" or not _blocks_run(model, device, dtype, book.get("model_impl")):
        raise ConfigError(
            f"--quantization {BLOCKS_INT8} needs one of Setpoint's own models in bfloat16 on a CPU;"
            " leave it out, or --dtype, --device and --model-impl."
        )
    book.put(
        "quantization",
        BLOCKS_INT8,
        f"given: the {' and '.join(rounded)} blocks of the model are multiplied by activations that"
        " are rounded to 8 bits; answers differ from those in bfloat16, which setpoint bench"
        " quality measures, and depend on the load",
    )


def check_cache_scales(options: Options, model: ModelSpec) -> None:
    """Raise ConfigError for a file of scales that the KV cache does not need, or that does not
    fit."""
    path, kind = options.model.quantization_param_path, options.model.kv_cache_dtype
    if path is None:
        return
    if not kind.startswith("fp8"):
        raise ConfigError(
            f"{OPTION} {path} has scales of a KV cache in fp8; give --kv-cache-dtype fp8_e4m3, or"
            " leave it out."
        )
    scales_in_file(
        path,
        num_layers=model.num_layers,
        rank=0,
        num_ranks=options.parallel.ranks_per_engine,
        model_type=model.model_type,
    )
