"""Maps a GGUF file's tensors to those of a Hugging Face-style checkpoint.

A GGUF file stores the experts of a layer as one tensor; in the checkpoint each is a tensor of its
own. Works on a parsed header.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from setpoint.checkpoint.gguf_architectures import Decoder, Experts
from setpoint.checkpoint.gguf_config import ROPE_FACTORS
from setpoint.checkpoint.gguf_file import GGUFFile, GGUFTensor
from setpoint.core.errors import CheckpointError

MLP = (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj"))


@dataclass(slots=True, frozen=True)
class Target:
    """One tensor of the new checkpoint, and the source of its rows."""

    name: str
    source: GGUFTensor
    heads: int = 0
    """As ``StoredBlocks.heads``."""
    is_router: bool = False
    """True for a matrix that every file stores as F32."""


@dataclass(slots=True, frozen=True)
class _Wanted:
    """A tensor of the file, which becomes one of the new checkpoint, or one for each expert."""

    old: str
    new: str
    """With "{}" for the number of the expert."""
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    """The shape in the file."""
    heads: int = 0
    is_router: bool = False


def targets(file: GGUFFile, decoder: Decoder, config: dict[str, Any]) -> list[Target]:
    """All tensors of the new checkpoint. Raises CheckpointError if one is missing or has a wrong
    shape, or if the file has a tensor that the model does not use."""
    left = dict(file.tensors)
    left.pop(ROPE_FACTORS, None)
    found = []
    for wanted in _wanted(decoder, config):
        tensor = left.pop(wanted.old, None)
        if tensor is None and wanted.old.replace("_exps.", ".0.") in left:
            raise CheckpointError(
                f"{file.path} has a tensor for each expert, as llama.cpp wrote them until April"
                " 2024. Only files with the experts of a layer in one tensor are read: download a"
                " newer file of the model, or convert the checkpoint again."
            )
        if tensor is None or tensor.shape != wanted.stored:
            state = "missing" if tensor is None else f"of shape {tensor.shape}"
            raise CheckpointError(
                f"{file.path}: tensor {wanted.old!r} is {state}; the metadata asks for"
                f" {wanted.stored}."
            )
        parts = tensor.parts() if "{}" in wanted.new else [replace(tensor, shape=wanted.shape)]
        found += [
            Target(wanted.new.format(index), part, wanted.heads, wanted.is_router)
            for index, part in enumerate(parts)
        ]
    if left:
        raise CheckpointError(
            f"{file.path}: tensor {min(left)!r} ({len(left)} in all) does not belong to a"
            f" {config['model_type']} model."
        )
    return found


def _wanted(decoder: Decoder, config: dict[str, Any]) -> Iterator[_Wanted]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield _plain("token_embd.weight", "model.embed_tokens.weight", vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        for part in (_attention(decoder, config), _mlp(decoder.experts, config)):
            for wanted in part:
                yield replace(
                    wanted,
                    old=f"blk.{layer}.{wanted.old}",
                    new=f"model.layers.{layer}.{wanted.new}",
                )
    yield _plain("output_norm.weight", "model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        yield _plain("output.weight", "lm_head.weight", vocab, hidden)


def _plain(old: str, new: str, *shape: int) -> _Wanted:
    return _Wanted(old, new, shape, shape)


def _attention(decoder: Decoder, config: dict[str, Any]) -> Iterator[_Wanted]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield _plain("attn_norm.weight", "input_layernorm.weight", hidden)
    for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        old, new, rows = f"attn_{letter}", f"self_attn.{letter}_proj", count * head_dim
        pairs = count if decoder.permutes and letter != "v" else 0
        yield replace(_plain(f"{old}.weight", f"{new}.weight", rows, hidden), heads=pairs)
        if decoder.qkv_bias:
            yield _plain(f"{old}.bias", f"{new}.bias", rows)
        if decoder.norms and letter != "v":
            size = head_dim if decoder.norms == "head" else rows
            yield _plain(f"{old}_norm.weight", f"self_attn.{letter}_norm.weight", size)
    yield _plain("attn_output.weight", "self_attn.o_proj.weight", hidden, heads * head_dim)


def _mlp(experts: Experts | None, config: dict[str, Any]) -> Iterator[_Wanted]:
    hidden = config["hidden_size"]
    yield _plain("ffn_norm.weight", "post_attention_layernorm.weight", hidden)
    if experts is None:
        for kind, name in MLP:
            shape = _matrix(kind, hidden, config["intermediate_size"])
            yield _plain(f"ffn_{kind}.weight", f"mlp.{name}.weight", *shape)
        return
    number, mlp = config[experts.num_key], experts.mlp
    router = _plain("ffn_gate_inp.weight", f"{mlp}.gate.weight", number, hidden)
    yield replace(router, is_router=True)
    for (kind, _), name in zip(MLP, experts.names, strict=True):
        shape = _matrix(kind, hidden, config[experts.size_key])
        new = f"{mlp}.experts.{{}}.{name}.weight"
        yield _Wanted(f"ffn_{kind}_exps.weight", new, shape, (number, *shape))
    if not experts.is_shared:
        return
    gate = f"{mlp}.shared_expert_gate.weight"
    yield _Wanted("ffn_gate_inp_shexp.weight", gate, (1, hidden), (hidden,), is_router=True)
    for kind, name in MLP:
        shape = _matrix(kind, hidden, config["shared_expert_intermediate_size"])
        yield _plain(f"ffn_{kind}_shexp.weight", f"{mlp}.shared_expert.{name}.weight", *shape)


def _matrix(kind: str, hidden: int, inner: int) -> tuple[int, int]:
    return (hidden, inner) if kind == "down" else (inner, hidden)
