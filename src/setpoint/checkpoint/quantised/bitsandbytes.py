"""bitsandbytes: NF4 and FP4 with a scale for each block of neighbours, which may be a code itself,
and int8 with a scale for each output (``SCB``). Source: bitsandbytes, functional.py (QuantState)
and nn/modules.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from setpoint.checkpoint.folder.safetensors_file import read_tensor
from setpoint.checkpoint.quantised.tensor_headers import Section, StoredTensors
from setpoint.core.quantised import Codes, NormalTable, QuantisedMatrix

STATE = ".weight.quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
BITS, LARGEST = 4, 127
MAX_STATE_BYTES = 1 << 16
NOTE = "meet activations that are not rounded to 8 bits as the folder asks"


def matrices(section: Section, tensors: StoredTensors) -> Iterator[QuantisedMatrix]:
    """The matrices of the folder. Raises CheckpointError for what is not served."""
    section.choice("bnb_4bit_quant_storage", ("uint8",), "uint8")
    for kind in KINDS:
        for path in list(tensors.named(STATE + kind)):
            yield _of_blocks(tensors, path, STATE + kind)
    for path in list(tensors.named(".SCB")):
        outputs, inputs = tensors.take(f"{path}.weight", ("I8",)).shape
        tensors.take(f"{path}.SCB", ("F32",), (outputs,))
        if f"{path}.weight_format" in tensors:
            tensors.take(f"{path}.weight_format", ("U8",), dims=0)
        yield QuantisedMatrix(
            f"{path}.weight",
            (outputs, inputs),
            Codes(f"{path}.weight", 8, offset=128),
            f"{path}.SCB",
            inputs,
            factor=1 / LARGEST,
            note=NOTE,
        )


def _of_blocks(tensors: StoredTensors, path: str, ending: str) -> QuantisedMatrix:
    weight, state = f"{path}.weight", _state(tensors, path + ending)
    outputs, inputs = state["shape"]
    block = state["blocksize"]
    if inputs % block:
        tensors.fail(weight, f"has {inputs} inputs, which blocks of {block} do not divide")
    count = outputs * inputs // block
    tensors.take(weight, ("U8",), (-(-outputs * inputs // 2), 1))
    tensors.take(f"{weight}.quant_map", ("F32",), (16,))
    scales, normal = f"{weight}.absmax", NormalTable(f"{weight}.quant_map")
    if f"{weight}.nested_absmax" in tensors:
        nested = min(state["nested_blocksize"], count)
        normal = NormalTable(
            normal.table,
            f"{weight}.nested_quant_map",
            f"{weight}.nested_absmax",
            nested,
            state["nested_offset"],
        )
        tensors.take(normal.nested_table, ("F32",), (256,))
        tensors.take(normal.nested_scales, ("F32",), (-(-count // nested),))
    tensors.take(scales, ("U8",) if normal.nested_table else ("F32",), (count,))
    codes = Codes(weight, BITS)
    return QuantisedMatrix(weight, (outputs, inputs), codes, scales, block, normal=normal)


def _state(tensors: StoredTensors, name: str) -> dict[str, Any]:
    """What the tensor of this name says as JSON: the matrix's shape and the sizes of its blocks."""
    (size,) = tensors.take(name, ("U8",), dims=1).shape
    if size > MAX_STATE_BYTES:
        tensors.fail(name, f"has {size} bytes; at most {MAX_STATE_BYTES} are read")
    try:
        state = json.loads(read_tensor(tensors.file(name), name))
        shape = [int(each) for each in state["shape"]]
        numbers = {
            "blocksize": int(state["blocksize"]),
            "nested_blocksize": int(state.get("nested_blocksize", 1)),
        }
        offset = float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        tensors.fail(name, "is not a description of a matrix")
    sizes = [*shape, *numbers.values()]
    if len(shape) != 2 or not all(0 < each < 1 << 28 for each in sizes) or abs(offset) > 1e30:
        tensors.fail(name, f"describes a matrix of shape {shape} with {numbers}")
    return {**numbers, "shape": shape, "nested_offset": offset}
