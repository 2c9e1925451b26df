"""Reads a model's small files: its configs and the headers of its weight files.

They are read once and tell a start everything about the model. They are available before the
weights: in the header of a GGUF file that is not converted yet, or in a hub repository. Reads no
weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setpoint.checkpoint import mxfp4, quantised
from setpoint.checkpoint.other_models import CONFIG_NAME, refuse_folder, refuse_other_configs
from setpoint.checkpoint.safetensors_file import TensorInfo, read_header
from setpoint.core.blocksfile import StoredBlocks, read_blocks_table
from setpoint.core.jsonfile import read_object
from setpoint.core.model import BLOCK_KINDS, language_tensor
from setpoint.core.quantised import QuantisedMatrix
from setpoint.core.weightfiles import weight_files

GENERATION_NAME = "generation_config.json"


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


def read_description(folder: Path, *, complete: bool = True) -> Description:
    """The description of the model in a folder.

    complete: False if weight files may be missing; then ``tensors`` is empty unless all are there.
    Raises CheckpointError if a file is unreadable or the model is not a text decoder.
    """
    path, generation = folder / CONFIG_NAME, folder / GENERATION_NAME
    if not path.is_file():
        refuse_folder(folder)
    as_written = read_object(path)
    config = quantised.with_settings(as_written, folder)
    generation_config = read_object(generation) if generation.exists() else {}
    files = weight_files(folder, complete=complete)
    refuse_other_configs(path, config)
    stored = {tensor.name: (tensor, file) for file in files for tensor in read_header(file)}
    plain, matrices = quantised.as_matrices(config, path, stored, of_config=config is as_written)
    of_matrices = quantised.blocks_of(
        matrices, {name: tensor.dtype for name, (tensor, _) in stored.items()}
    )
    tensors, in_mxfp4 = mxfp4.as_matrices(plain)
    table = read_blocks_table(folder) if files else None
    in_gguf, blocks = in_blocks(table.tensors if table else {})
    return Description(
        path=path,
        config=config,
        generation_path=generation,
        generation=generation_config,
        tensors=tensors + in_gguf,
        blocks=in_mxfp4 + of_matrices + blocks,
        matrices=matrices,
    )


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
