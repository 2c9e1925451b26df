"""Reads a model's small files: its configs and the headers of its weight files.

They are read once and tell a start everything about the model. They are available before the
weights: in the header of a GGUF file that is not converted yet, or in a hub repository. Reads no
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setpoint.checkpoint.mxfp4 import as_matrices
from setpoint.checkpoint.other_models import CONFIG_NAME, refuse_folder, refuse_other_configs
from setpoint.checkpoint.safetensors_file import TensorInfo, read_header
from setpoint.core.jsonfile import read_object
from setpoint.core.model import BLOCKS_FILE, language_tensor
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
    """Every stored tensor, those in MXFP4 as matrices; empty without weight files."""
    blocks: tuple[TensorInfo, ...]
    """The matrices in blocks: those of ``core.model.BLOCKS_FILE``, and those in MXFP4."""

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
    blocks = folder / BLOCKS_FILE
    if not path.is_file():
        refuse_folder(folder)
    config = read_object(path)
    generation_config = read_object(generation) if generation.exists() else {}
    files = weight_files(folder, complete=complete)
    refuse_other_configs(path, config)
    tensors, in_tensors = as_matrices([tensor for file in files for tensor in read_header(file)])
    return Description(
        path=path,
        config=config,
        generation_path=generation,
        generation=generation_config,
        tensors=tensors,
        blocks=in_tensors + (tuple(read_header(blocks)) if files and blocks.is_file() else ()),
    )
