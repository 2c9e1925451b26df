"""Finds the matrices that a checkpoint stores as codes and scales of MXFP4."""

from __future__ import annotations

from collections.abc import Sequence

from setpoint.checkpoint.folder.safetensors_file import TensorInfo
from setpoint.core.errors import CheckpointError
from setpoint.core.model import BLOCK_KINDS, MXFP4_SUFFIXES


def as_matrices(
    stored: Sequence[TensorInfo],
) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """(the tensors, with a matrix in bfloat16 in place of its codes and scales; the blocks of these
    matrices, named as in ``Description``). Raises CheckpointError for codes and scales that are no
    bytes, and for a matrix that is stored twice."""
    codes_end, scales_end = MXFP4_SUFFIXES
    names, block = {tensor.name for tensor in stored}, BLOCK_KINDS["MXFP4"]
    tensors, blocks = [], []
    for tensor in stored:
        name = tensor.name.removesuffix(codes_end).removesuffix(scales_end)
        if not {name + codes_end, name + scales_end} <= names:
            tensors.append(tensor)
            continue
        if name in names:
            raise CheckpointError(
                f"Tensor {name!r} is stored twice: as it is, and as codes and scales of MXFP4."
            )
        if tensor.dtype != "U8" or not tensor.num_elements or not tensor.shape:
            raise CheckpointError(
                f"Tensor {tensor.name!r} holds {tensor.dtype} of shape {list(tensor.shape)}; the"
                " codes and scales of MXFP4 are bytes (U8) of several dimensions, none of them"
                " empty."
            )
        if tensor.name.endswith(scales_end):
            *rows, groups = tensor.shape
            tensors.append(TensorInfo(name, (*rows, groups * block.num_values), "BF16"))
            blocks.append(TensorInfo(f"{name}.MXFP4", (*rows, groups * block.num_bytes), "U8"))
    return tuple(tensors), tuple(blocks)
