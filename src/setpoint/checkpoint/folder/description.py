"""What the small files of a model say, before its weights are downloaded or converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setpoint.checkpoint.folder.safetensors_file import TensorInfo
from setpoint.core.blocksfile import StoredBlocks
from setpoint.core.model import BLOCK_KINDS, language_tensor
from setpoint.core.quantised import QuantisedMatrix


@dataclass(slots=True, frozen=True)
class Description:
    """The content of a model's small files."""

    path: Path
    """The config.json or GGUF file, which messages name."""
    config: dict[str, Any]
    generation_path: Path
    generation: dict[str, Any]
    """generation_config.json; empty without that file."""
    tensors: tuple[TensorInfo, ...]
    """Every stored tensor, those in blocks as matrices; empty without weight files."""
    blocks: tuple[TensorInfo, ...]
    """The matrices in blocks as uint8 [rows, bytes of a row], named "NAME.KIND": those that stay in
    a GGUF file, and those of a quantised folder."""
    matrices: tuple[QuantisedMatrix, ...] = ()
    """The matrices that the folder stores as codes and scales, but for those in MXFP4."""

    @property
    def language_tensors(self) -> tuple[TensorInfo, ...]:
        """The tensors of the language model in a multimodal one."""
        return tuple(tensor for tensor in self.tensors if language_tensor(tensor.name))


def in_blocks(
    stored: Mapping[str, StoredBlocks],
) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """(the matrices that stay in a GGUF file, their blocks), as in ``Description``."""
    matrices, blocks = [], []
    for name, each in stored.items():
        rows, k = each.shape
        matrices.append(TensorInfo(name, (rows, k), "BF16"))
        row_bytes = BLOCK_KINDS[each.kind].row_bytes(k)
        blocks.append(TensorInfo(f"{name}.{each.kind}", (rows, row_bytes), "U8"))
    return tuple(matrices), tuple(blocks)
