"""Writes a tiny model of a family as a GGUF file, as llama.cpp's converter and quantizer would, and
the checkpoint of the values in it, for tests.

The names are written down here a second time, so that a test does not compare the conversion with
itself.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import bfloat16, from_numpy

from setpoint.core.model import BLOCK_KINDS
from setpoint.testing import tiny_gguf
from setpoint.testing.against_transformers import write_tiny
from setpoint.testing.goldens import tiny_config
from setpoint.testing.tiny_gguf import Array

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": None,
}
QWEN = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config(
        "MixtralForCausalLM",
        "mixtral",
        **{**SIZES, "intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmoe": tiny_config(
        "OlmoeForCausalLM",
        "olmoe",
        **{
            **SIZES,
            "intermediate_size": 256,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
    ),
    "qwen2": tiny_config("Qwen2ForCausalLM", "qwen2", **{**SIZES, "intermediate_size": 512}),
    "qwen2moe": tiny_config(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        **{**SIZES, **QWEN, "shared_expert_intermediate_size": 512, "norm_topk_prob": False},
    ),
    "qwen3": tiny_config(
        "Qwen3ForCausalLM",
        "qwen3",
        **{**SIZES, "intermediate_size": 512, "tie_word_embeddings": True},
    ),
    "qwen3moe": tiny_config(
        "Qwen3MoeForCausalLM", "qwen3_moe", **{**SIZES, **QWEN, "norm_topk_prob": True}
    ),
}
"""GGUF's architecture -> the config of a tiny model of it. Every row fits every kind of block."""
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
NAMES = (
    (r"model\.embed_tokens", "token_embd"),
    (r"model\.norm", "output_norm"),
    (r"lm_head", "output"),
    (r"model\.layers", "blk"),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"mlp\.shared_expert_gate", "ffn_gate_inp_shexp"),
    (r"mlp\.shared_expert\.(\w+)_proj", r"ffn_\1_shexp"),
    (r"(mlp|block_sparse_moe)\.gate\.", "ffn_gate_inp."),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
    (r"mlp\.experts\.(\d+)\.(\w+)_proj", r"ffn_\2_exps.\1"),
    (r"block_sparse_moe\.experts\.(\d+)\.w1", r"ffn_gate_exps.\1"),
    (r"block_sparse_moe\.experts\.(\d+)\.w2", r"ffn_down_exps.\1"),
    (r"block_sparse_moe\.experts\.(\d+)\.w3", r"ffn_up_exps.\1"),
)
"""(pattern in a checkpoint's names, what GGUF has in its place)."""
K_QUANTS = ("Q4_K", "Q6_K")
"""Kinds of blocks that the gguf package cannot make."""


def mixed(name: str) -> GGMLQuantizationType:
    """The kinds of a tiny Q4_K_M file: 6 bits for the embedding, and for the values and the down
    projections of the first layer."""
    six = name.startswith("token_embd") or name in (
        "blk.0.attn_v.weight",
        "blk.0.ffn_down.weight",
        "blk.0.ffn_down_exps.weight",
    )
    return GGMLQuantizationType.Q6_K if six else GGMLQuantizationType.Q4_K


def write_model(
    folder: Path, architecture: str, kind_of: Callable[[str], GGMLQuantizationType]
) -> tuple[Path, Path]:
    """Write a model with random weights below ``folder``. kind_of: GGUF's name of a matrix -> its
    kind. Returns (GGUF file, folder of a checkpoint with the same values in bfloat16)."""
    config = CONFIGS[architecture]
    checkpoint = write_tiny(folder / "checkpoint", config)
    (weights,) = checkpoint.glob("*.safetensors")
    found: dict[str, Array] = {}
    values: dict[str, Array] = {}
    raw: dict[str, tuple[Array, GGMLQuantizationType]] = {}
    stacks: defaultdict[str, list[str]] = defaultdict(list)
    tensors = load_file(weights)
    for name in sorted(tensors, key=_numbers):
        old = _gguf_name(name)
        if expert := re.fullmatch(r"(.*_exps)\.(\d+)\.weight", old):
            old = f"{expert[1]}.weight"
        stacks[old].append(name)
    for old, names in stacks.items():
        order = _row_order(architecture, config, old)
        whole = np.stack([tensors[name] for name in names]) if "_exps" in old else tensors[names[0]]
        if "inp" in old or whole.ndim == 1:
            found[old] = whole[0] if old.endswith("shexp.weight") else whole
            values[names[0]] = whole
            continue
        kind = kind_of(old)
        blocks = _blocks(whole, kind)
        decoded = gguf.dequantize(blocks, kind)
        values |= dict(zip(names, decoded if "_exps" in old else [decoded], strict=True))
        raw[old] = (blocks if order is None else blocks[order], kind)
        found[old] = whole
    rounded = {name: from_numpy(value.copy()).to(bfloat16) for name, value in values.items()}
    save_file(rounded, weights, {"format": "pt"})
    config = config | {"torch_dtype": "bfloat16"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    path = tiny_gguf.write(
        folder / f"{architecture}.gguf", found, metadata(architecture), arch=architecture, raw=raw
    )
    return path, checkpoint


def metadata(architecture: str) -> dict[str, Any]:
    """Every metadata key of the tiny file of this architecture."""
    config = CONFIGS[architecture]
    config = {"num_experts": config.get("num_local_experts"), **config}
    common = tiny_gguf.metadata(tiny_gguf.TinyLlama())
    vocabulary = {key: value for key, value in common.items() if key.startswith("tokenizer")}
    own = {
        f"{architecture}.{key}": config[name]
        for key, name in KEYS.items()
        if config.get(name) is not None
    }
    return vocabulary | own


def _gguf_name(name: str) -> str:
    for pattern, new in NAMES:
        name = re.sub(pattern, new, name)
    return name


def _numbers(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in names as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _row_order(architecture: str, config: dict[str, Any], name: str) -> Array | None:
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(
        name.split(".")[-2]
    )
    if architecture != "llama" or heads is None:
        return None
    rows = np.arange(config[heads] * config["head_dim"])
    return tiny_gguf.permuted(rows, config[heads])


def _blocks(values: Array, kind: GGMLQuantizationType) -> Array:
    """The blocks of ``values``; of a K-quant, which the gguf package cannot make, random ones."""
    if kind.name not in K_QUANTS:
        return gguf.quantize(values, kind)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.size)
    shape = (*values.shape[:-1], values.shape[-1] // block, block_bytes)
    raw = rng.integers(0, 256, shape, dtype=np.uint8)
    for at in BLOCK_KINDS[kind.name].scales:
        scales = rng.normal(0, 1e-4, shape[:-1]).astype(np.float16)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(*values.shape[:-1], -1)
