"""Maps a GGUF file's tensors to those of a Hugging Face-style checkpoint.

A GGUF file stores the experts of a layer as one tensor; in the checkpoint each is a tensor of its
own. Works on a parsed header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from setpoint.checkpoint.gguf.architecture import (
    Config,
    DecoderArchitecture,
    LayerTensors,
    TensorMapping,
    plain,
)
from setpoint.checkpoint.gguf.header import GGUFFile, GGUFTensor
from setpoint.checkpoint.gguf.rotation import LONG, ROPE_FACTORS, SHORT
from setpoint.core.errors import CheckpointError

LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(slots=True, frozen=True)
class Target:
    """One tensor of the new checkpoint, and the source of its rows. The other fields are those of
    ``TensorMapping``."""

    name: str
    source: GGUFTensor
    shape: tuple[int, ...]
    heads: int = 0
    is_router: bool = False
    is_wide: bool = False
    offset: float = 0.0
    values: GGUFTensor | None = None


def targets(file: GGUFFile, decoder: DecoderArchitecture, config: Config) -> list[Target]:
    """All tensors of the new checkpoint. Raises CheckpointError if one is missing or has a wrong
    shape, or if the file has a tensor that the model does not use."""
    left = dict(file.tensors)
    for name in (ROPE_FACTORS, LONG, SHORT):
        left.pop(name, None)
    found: list[Target] = []
    for wanted in _wanted(file, decoder, config):
        found += _made_of(file, left, wanted)
    last = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    for name in list(left):  # layers that predict further tokens, which are not used
        if (layer := LAYER.match(name)) and config["num_hidden_layers"] <= int(layer[1]) < last:
            del left[name]
    if left:
        raise CheckpointError(
            f"{file.path}: tensor {min(left)!r} ({len(left)} in all) does not belong to a"
            f" {config['model_type']} model."
        )
    return found


def _made_of(
    file: GGUFFile, left: dict[str, GGUFTensor], wanted: TensorMapping
) -> Iterator[Target]:
    """The targets of a wanted tensor, which is taken out of ``left``."""
    tensor = left.pop(wanted.old, None)
    if tensor is None and wanted.old.replace("_exps.", ".0.") in left:
        raise CheckpointError(
            f"{file.path} has a tensor for each expert, as llama.cpp wrote them until April"
            " 2024. Only files with the experts of a layer in one tensor are read: download a"
            " newer file of the model, or convert the checkpoint again."
        )
    if tensor is None or _extents(tensor.shape) != _extents(wanted.stored):
        state = "missing" if tensor is None else f"of shape {tensor.shape}"
        raise CheckpointError(
            f"{file.path}: tensor {wanted.old!r} is {state}; the metadata asks for {wanted.stored}."
        )
    values = left.pop(wanted.values, None)
    if wanted.values:
        heads, rank, key_size = wanted.stored
        shape = (heads, wanted.shape[0] // heads - key_size, rank)
        if values is None or _extents(values.shape) != _extents(shape):
            raise CheckpointError(f"{file.path}: tensor {wanted.values!r} is not of shape {shape}.")
    if "{}" in wanted.new:
        parts = replace(tensor, shape=wanted.stored).parts()
    elif values is not None:
        parts = [replace(tensor, shape=wanted.stored)]
        values = replace(values, shape=shape)
    else:
        parts = [replace(tensor, shape=wanted.shape)]
    for index, part in enumerate(parts):
        yield Target(
            wanted.new.format(index),
            part,
            wanted.shape,
            wanted.heads,
            wanted.is_router,
            wanted.is_wide,
            wanted.offset,
            values,
        )


def _extents(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without leading ones, which are no part of a shape in ggml: some files have them
    and others do not."""
    first = next((at for at, extent in enumerate(shape) if extent != 1), len(shape))
    return shape[first:]


def _wanted(
    file: GGUFFile, decoder: DecoderArchitecture, config: Config
) -> Iterator[TensorMapping]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield plain("token_embd.weight", "model.embed_tokens.weight", vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        prefix = f"blk.{index}."
        for wanted in decoder.layer(LayerTensors(decoder, config, index, file.tensors)):
            yield replace(
                wanted,
                old=prefix + wanted.old,
                new=f"model.layers.{index}.{wanted.new}",
                values=wanted.values and prefix + wanted.values,
                offset=decoder.norm_offset if wanted.new.endswith("norm.weight") else 0.0,
            )
    norm = plain("output_norm.weight", "model.norm.weight", hidden)
    yield replace(norm, offset=decoder.norm_offset)
    if not config["tie_word_embeddings"]:
        yield plain("output.weight", "lm_head.weight", vocab, hidden)
