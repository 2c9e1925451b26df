"""Small GGUF files, valid but for what a test changes, and their conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors import deserialize

from setpoint.checkpoint.gguf.convert import converted_folder
from setpoint.core.blocksfile import gguf_of, read_blocks_table
from setpoint_testing import tiny_gguf

MODEL = tiny_gguf.TinyLlama()


def write(
    path: Path,
    *,
    model: tiny_gguf.TinyLlama = MODEL,
    keys: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    **how: Any,
) -> Path:
    """A valid file but for what a test changes: ``keys`` are set, metadata and tensors in ``drop``
    left out."""
    values = tiny_gguf.metadata(model) | (keys or {})
    tensors = tiny_gguf.gguf_tensors(model, model.weights()) | how.pop("tensors", {})
    values = {key: value for key, value in values.items() if key not in drop}
    return tiny_gguf.write(
        path, {name: value for name, value in tensors.items() if name not in drop}, values, **how
    )


def convert(path: Path) -> Path:
    return converted_folder(path, log=lambda line: None)


def load(folder: Path) -> dict[str, np.ndarray]:
    """Tensors as float32. The library checks the file's layout; bfloat16, which numpy lacks, goes
    through its bits."""
    result = _load_blocks(folder)
    for name, tensor in deserialize((folder / "model.safetensors").read_bytes()):
        if tensor["dtype"] == "BF16":
            values = (np.frombuffer(tensor["data"], "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(
                tensor["data"], {"F32": "<f4", "F16": "<f2"}[tensor["dtype"]]
            ).astype(np.float32)
        result[name] = values.reshape(tensor["shape"])
    return result


def _load_blocks(folder: Path) -> dict[str, np.ndarray]:
    """The tensors that stay in the GGUF file."""
    table, result = read_blocks_table(folder), {}
    for name, stored in table.tensors.items() if table else ():
        kind = GGMLQuantizationType[stored.kind]
        rows, k = stored.shape
        block, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = rows * k // block * block_bytes
        raw = np.fromfile(gguf_of(folder), np.uint8, num_bytes, offset=stored.offset)
        values = gguf.dequantize(raw.reshape(rows, -1), kind)
        if stored.heads:
            order = tiny_gguf.permuted(np.arange(rows), stored.heads)
            values[order] = values.copy()
        bits = gguf.quantize(values, GGMLQuantizationType.BF16)
        result[name] = gguf.dequantize(bits, GGMLQuantizationType.BF16)
    return result
