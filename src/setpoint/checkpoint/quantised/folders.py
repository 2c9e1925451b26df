"""Folders of quantised weights: finds the matrices that a folder stores as codes and scales, in the
format that its config names (decision 0080)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from setpoint.checkpoint.folder.configfile import short_repr
from setpoint.checkpoint.folder.safetensors_file import TensorInfo
from setpoint.checkpoint.quantised import awq, bitsandbytes, compressed_tensors, fp8, gptq
from setpoint.checkpoint.quantised.tensor_headers import Section, StoredTensors
from setpoint.core.jsonfile import read_object
from setpoint.core.model import BLOCK_KINDS
from setpoint.core.quantised import KEY, QuantisedMatrix, method_of

FORMATS = {
    "awq": awq.matrices,
    "gptq": gptq.matrices,
    "compressed-tensors": compressed_tensors.matrices,
    "fp8": fp8.matrices,
    "bitsandbytes": bitsandbytes.matrices,
}
"""``quant_method`` -> the matrices of a folder."""
GPTQ_NAME = "quantize_config.json"
"""Holds the settings of folders from the time before ``quantization_config``."""
MATRIX_END = ".weight"
CACHE_SCHEME = "kv_cache_scheme"
"""The key of a folder that has scales for a KV cache in 8 bits, if only these."""


def with_settings(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A folder's config.json, with the settings that an old GPTQ folder has in a file of their own.
    Raises CheckpointError if that is unreadable."""
    path = folder / GPTQ_NAME
    if KEY in config or not path.is_file():
        return config
    return config | {KEY: {"quant_method": "gptq"} | read_object(path)}


def as_matrices(
    config: Mapping[str, Any],
    path: Path,
    stored: Mapping[str, tuple[TensorInfo, Path]],
    *,
    of_config: bool = True,
) -> tuple[tuple[TensorInfo, ...], tuple[QuantisedMatrix, ...]]:
    """(the tensors, with a matrix in bfloat16 in place of its codes and scales; these matrices).
    path: of config.json. stored: tensor name -> header and file. of_config: whether the settings
    are in config.json, and not in a file of their own. Raises a CheckpointError that names file and
    tensor for what cannot be read."""
    read = FORMATS.get(method_of(config))
    if read is None or not stored:
        return tuple(tensor for tensor, _ in stored.values()), ()
    tensors = StoredTensors(path.parent, stored)
    own = path.with_name(GPTQ_NAME)
    section = Section(path, config[KEY]) if of_config else Section(own, config[KEY], where="")
    found = _with_tensors(list(read(section, tensors)), tensors.taken)
    if not found and not section.values.get(CACHE_SCHEME):
        section.fail(
            "quant_method", f"is {short_repr(method_of(config))}, but no tensor is quantised"
        )
    for each in found:
        tensors.check_no_matrix(each.name)
    matrices = (TensorInfo(each.name, each.shape, "BF16") for each in found)
    return (*tensors.left(), *matrices), found


def _with_tensors(
    matrices: Iterable[QuantisedMatrix], taken: Iterable[str]
) -> tuple[QuantisedMatrix, ...]:
    """The matrices with the names of the tensors that were taken for them."""
    of_modules: dict[str, list[str]] = {each.name.removesuffix(MATRIX_END): [] for each in matrices}
    for name in sorted(taken):
        module = name.rpartition(".")[0]
        while module not in of_modules:
            module = module.rpartition(".")[0]
        of_modules[module].append(name)
    return tuple(
        replace(each, tensors=tuple(of_modules[each.name.removesuffix(MATRIX_END)]))
        for each in matrices
    )


def blocks_of(
    matrices: tuple[QuantisedMatrix, ...], dtypes: Mapping[str, str]
) -> tuple[TensorInfo, ...]:
    """The matrices that the engine will probably keep in blocks, as in ``Description``. dtypes: the
    type of each stored tensor. Only the engine, which reads the zeros and the order, knows it."""
    found = []
    for each in matrices:
        if kind := _kind(each, dtypes):
            outputs, inputs = each.shape
            shape = outputs, BLOCK_KINDS[kind].row_bytes(inputs)
            found.append(TensorInfo(f"{each.name}.{kind}", shape, "U8"))
    return tuple(found)


def planned_kind(config: Mapping[str, Any]) -> str:
    """The kind in which most matrices of a folder will be kept, by its config alone: the weights of
    a model of the hub are planned before they are here. "": in bfloat16."""
    section = config.get(KEY)
    values: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    match method_of(config):
        case "awq":
            return "INT4Z"
        case "gptq" if not values.get("desc_act"):
            narrow = "Q4_0" if values.get("sym") else "INT4Z"
            return narrow if values.get("bits") == 4 else "INT8Z"
        case "fp8":
            return "FP8"
        case "bitsandbytes" if values.get("load_in_8bit"):
            return "INT8Z"
        case "compressed-tensors":
            return _planned_scheme(values)
    return ""


def _planned_scheme(values: Mapping[str, Any]) -> str:
    groups = values.get("config_groups")
    scheme = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
    if not isinstance(weights, Mapping):
        return ""
    if weights.get("type") == "float":
        return "FP8"
    is_symmetric = weights.get("symmetric") is not False
    if weights.get("num_bits") == 4:
        return "Q4_0" if is_symmetric else "INT4Z"
    return "Q8_0" if is_symmetric else "INT8Z"


def _kind(matrix: QuantisedMatrix, dtypes: Mapping[str, str]) -> str:
    if matrix.normal:
        return ""
    if matrix.activations:
        return "W8A8"
    if not matrix.fits_blocks or matrix.is_reordered:
        return ""
    if matrix.is_float:
        return "FP8"
    is_symmetric = matrix.zeros is None or matrix.is_symmetric
    if dtypes.get(matrix.scales) == "F32":
        return "INT8Z"
    if matrix.codes.bits == 8:
        return "Q8_0" if is_symmetric else "INT8Z"
    return "Q4_0" if is_symmetric else "INT4Z"
