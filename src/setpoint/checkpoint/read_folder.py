"""Reads a model's small files: its configs and the headers of its weight files.

They are read once and tell a start everything about the model. They are available before the
weights: in the header of a GGUF file that is not converted yet, or in a hub repository. Reads no
weights.
"""

from __future__ import annotations

from pathlib import Path

from setpoint.checkpoint.folder.description import Description, in_blocks
from setpoint.checkpoint.folder.other_models import CONFIG_NAME, refuse_folder, refuse_other_configs
from setpoint.checkpoint.folder.safetensors_file import read_header
from setpoint.checkpoint.quantised import folders, mxfp4
from setpoint.core.blocksfile import read_blocks_table
from setpoint.core.cache_scales import place_of
from setpoint.core.jsonfile import read_object
from setpoint.core.weightfiles import weight_files

GENERATION_NAME = "generation_config.json"


def read_description(folder: Path, *, complete: bool = True) -> Description:
    """The description of the model in a folder.

    complete: False if weight files may be missing; then ``tensors`` is empty unless all are there.
    Raises CheckpointError if a file is unreadable or the model is not a text decoder.
    """
    path, generation = folder / CONFIG_NAME, folder / GENERATION_NAME
    if not path.is_file():
        refuse_folder(folder)
    as_written = read_object(path)
    config = folders.with_settings(as_written, folder)
    generation_config = read_object(generation) if generation.exists() else {}
    files = weight_files(folder, complete=complete)
    refuse_other_configs(path, config)
    stored = {tensor.name: (tensor, file) for file in files for tensor in read_header(file)}
    stored = {name: each for name, each in stored.items() if place_of(name) is None}
    plain, matrices = folders.as_matrices(config, path, stored, of_config=config is as_written)
    of_matrices = folders.blocks_of(
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
