"""What a GGUF architecture is: the names that transformers has for it, how its config is read, and
which tensors a layer has. Knows no architecture; ``gguf_architectures`` has a table of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

from setpoint.checkpoint.gguf.header import GGUFFile

Config = dict[str, Any]
"""A config.json."""
MLP = (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj"))


@dataclass(slots=True, frozen=True)
class Experts:
    """The experts of a decoder."""

    num_key: str
    """config.json's key of their number."""
    sized_by: str
    """GGUF's key of an expert's inner size."""
    size_key: str
    """config.json's key of it."""
    normalise: bool | None
    """Whether the weights of a token's experts are made to sum to one. llama.cpp's code says so,
    not the file; None: the file does, and without a word they are not."""
    mlp: str = "mlp"
    """Name of a layer's part with experts in the new checkpoint."""
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """An expert's gate, up and down in it."""
    is_shared: bool = False
    """Whether every token uses one more expert, which the router weighs too."""


@dataclass(slots=True, frozen=True)
class TensorMapping:
    """A tensor of the file, which becomes one of the new checkpoint, or one for each expert."""

    old: str
    new: str
    """The name in the checkpoint, with "{}" for the number of the expert."""
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    """The shape in the file."""
    heads: int = 0
    """Number of heads, with the meaning of ``StoredBlocks.heads``."""
    is_router: bool = False
    """True for a matrix that every file stores as F32."""
    is_wide: bool = False
    """True for a vector that keeps 32 bits."""
    offset: float = 0.0
    """What the file adds to the checkpoint's values."""
    values: str = ""
    """The second tensor of ``kv_b_proj``, if that is stored in two: V's part [heads, value size,
    rank]; the first, ``stored`` [heads, rank, key size], is K's part, transposed."""


@dataclass(slots=True, frozen=True)
class LayerTensors:
    """What the tensors of a layer depend on."""

    decoder: DecoderArchitecture
    config: Config
    index: int
    tensors: Container[str]
    """The names of all tensors of the file."""

    def has(self, name: str) -> bool:
        return f"blk.{self.index}.{name}" in self.tensors


@dataclass(slots=True, frozen=True)
class DecoderArchitecture:
    """A decoder whose layers are attention and a gated MLP, or experts."""

    architecture: str
    """transformers' name of the causal language model."""
    model_type: str
    config: Callable[[GGUFFile, DecoderArchitecture], Config]
    """(file, decoder) -> the part of config.json that describes the model."""
    layer: Callable[[LayerTensors], Iterator[TensorMapping]]
    """The tensors of a layer, without "blk.N." and "model.layers.N."."""
    reads: frozenset[str] = frozenset()
    """The keys of ``config_json.NEUTRAL`` whose values ``config`` reads."""
    permutes: bool = False
    """Whether llama.cpp's converter reorders the rows of q and k, to rotate neighbours in place of
    halves."""
    qkv_bias: bool = False
    norms: str = ""
    """"head": q and k have a norm over each head; "whole": over all heads together; "": none."""
    norm_offset: float = 0.0
    """What the file adds to the weights of every norm."""
    experts: Experts | None = None
    rotates_a_part: bool = False
    """Whether fewer numbers of a head may be rotated than it has."""


def plain(old: str, new: str, *shape: int) -> TensorMapping:
    return TensorMapping(old, new, shape, shape)


def usual_layer(layer: LayerTensors) -> Iterator[TensorMapping]:
    """A norm, attention, a norm, and the MLP or the experts."""
    hidden = layer.config["hidden_size"]
    yield plain("attn_norm.weight", "input_layernorm.weight", hidden)
    yield from attention(layer)
    yield plain("ffn_norm.weight", "post_attention_layernorm.weight", hidden)
    yield from experts(layer) if layer.decoder.experts else mlp(layer)


def attention(layer: LayerTensors) -> Iterator[TensorMapping]:
    """q, k, v and the output's projection, with q, k and v in one tensor or in three."""
    decoder, config = layer.decoder, layer.config
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    is_fused = not decoder.permutes and layer.has("attn_qkv.weight")
    if is_fused:
        rows = sum(counts.values()) * head_dim
        yield plain("attn_qkv.weight", "self_attn.qkv_proj.weight", rows, hidden)
        if decoder.qkv_bias:
            yield plain("attn_qkv.bias", "self_attn.qkv_proj.bias", rows)
    for letter, count in counts.items():
        old, new, rows = f"attn_{letter}", f"self_attn.{letter}_proj", count * head_dim
        if not is_fused:
            pairs = count if decoder.permutes and letter != "v" else 0
            yield replace(plain(f"{old}.weight", f"{new}.weight", rows, hidden), heads=pairs)
        if decoder.qkv_bias and not is_fused:
            yield plain(f"{old}.bias", f"{new}.bias", rows)
        if decoder.norms and letter != "v":
            size = head_dim if decoder.norms == "head" else rows
            yield plain(f"{old}_norm.weight", f"self_attn.{letter}_norm.weight", size)
    yield plain("attn_output.weight", "self_attn.o_proj.weight", hidden, heads * head_dim)


def mlp(
    layer: LayerTensors, size: int = 0, *, suffix: str = "", name: str = "mlp"
) -> Iterator[TensorMapping]:
    """A gated MLP of the model's intermediate size, or of another one."""
    hidden, size = layer.config["hidden_size"], size or layer.config["intermediate_size"]
    for kind, own in MLP:
        shape = _matrix(kind, hidden, size)
        yield plain(f"ffn_{kind}{suffix}.weight", f"{name}.{own}.weight", *shape)


def experts(layer: LayerTensors) -> Iterator[TensorMapping]:
    """The router, the experts, and the shared expert that the router weighs, if there is one."""
    config, how = layer.config, layer.decoder.experts
    assert how is not None
    hidden, number = config["hidden_size"], config[how.num_key]
    router = plain("ffn_gate_inp.weight", f"{how.mlp}.gate.weight", number, hidden)
    yield replace(router, is_router=True)
    yield from expert_matrices(layer, how)
    if not how.is_shared:
        return
    gate = f"{how.mlp}.shared_expert_gate.weight"
    yield TensorMapping("ffn_gate_inp_shexp.weight", gate, (1, hidden), (hidden,), is_router=True)
    size = config["shared_expert_intermediate_size"]
    yield from mlp(layer, size, suffix="_shexp", name=f"{how.mlp}.shared_expert")


def expert_matrices(layer: LayerTensors, how: Experts) -> Iterator[TensorMapping]:
    hidden, number = layer.config["hidden_size"], layer.config[how.num_key]
    for (kind, _), name in zip(MLP, how.names, strict=True):
        shape = _matrix(kind, hidden, layer.config[how.size_key])
        new = f"{how.mlp}.experts.{{}}.{name}.weight"
        yield TensorMapping(f"ffn_{kind}_exps.weight", new, shape, (number, *shape))


def _matrix(kind: str, hidden: int, inner: int) -> tuple[int, int]:
    return (hidden, inner) if kind == "down" else (inner, hidden)
