"""Writes a tiny model of a family as a GGUF file, as llama.cpp's converter and quantizer would, and
the checkpoint of the values in it, for tests.

The names are written down here a second time, so that a test does not compare the conversion with
itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import bfloat16, from_numpy

from setpoint.core.model import BLOCK_KINDS
from setpoint_testing import tiny_gguf
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.goldens import GPT_OSS_YARN, YARN, tiny_config
from setpoint_testing.tiny_gguf import Array

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
MIXED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
DEEPSEEK: dict[str, Any] = {
    **SIZES,
    **MIXED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 256,
    "v_head_dim": 64,
    "head_dim": 64,
}


def gemma(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    own = {
        "intermediate_size": 512,
        "sliding_window": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "tie_word_embeddings": True,
    }
    config = tiny_config(architecture, model_type, **{**SIZES, **own, **keys})
    del config["hidden_act"]
    return config


def phi3(original: int, **keys: Any) -> dict[str, Any]:
    pairs = int(SIZES["head_dim"] * keys.get("partial_rotary_factor", 1.0)) // 2
    lists = {"short_factor": [1.05**each for each in range(pairs)]}
    lists["long_factor"] = [1.3**each for each in range(pairs)]
    rounded = {name: [float(np.float32(each)) for each in found] for name, found in lists.items()}
    own = {
        "intermediate_size": 512,
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": original,
        "rope_scaling": {"type": "longrope", **rounded},
    }
    return tiny_config("Phi3ForCausalLM", "phi3", **{**SIZES, **own, **keys})


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config(
        "MixtralForCausalLM",
        "mixtral",
        **{**SIZES, "intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama/dense": tiny_config("LlamaForCausalLM", "llama", **{**SIZES, "intermediate_size": 512}),
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
    "qwen3/yarn": tiny_config(
        "Qwen3ForCausalLM",
        "qwen3",
        **{
            **SIZES,
            "intermediate_size": 512,
            "max_position_embeddings": 64,
            "rope_scaling": {**YARN, "rope_type": "yarn"},
        },
    ),
    "gemma2": gemma(
        "Gemma2ForCausalLM",
        "gemma2",
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
        num_hidden_layers=3,
    ),
    "gemma3": gemma(
        "Gemma3ForCausalLM",
        "gemma3_text",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=6,
        num_hidden_layers=7,
    ),
    "phi3": phi3(128, partial_rotary_factor=0.75, tie_word_embeddings=True),
    "phi3/long": phi3(32, sliding_window=16),
    "gpt-oss": tiny_config(
        "GptOssForCausalLM",
        "gpt_oss",
        **{
            **SIZES,
            "intermediate_size": 256,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "sliding_window": 16,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "num_hidden_layers": 3,
            "rope_scaling": {
                **GPT_OSS_YARN,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "deepseek2": tiny_config(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        **{
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "routed_scaling_factor": 16.0,
            "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
            "max_position_embeddings": 64,
        },
    ),
    "deepseek2/v3": tiny_config(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        **{**DEEPSEEK, "q_lora_rank": 256, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "glm4moe": tiny_config(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        **{
            **SIZES,
            **MIXED,
            "use_qk_norm": True,
            "attention_bias": True,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
    ),
}
"""GGUF's architecture, and after a "/" a variant -> the config of a tiny model. Every row fits
every kind of block."""
LENGTHS = {"phi3/long": (37, 40, 50)}
"""The lengths of prompts that transformers can judge, for models with other than the usual ones."""
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
}
ROPE_KEYS = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
NAMES = (
    (r"model\.embed_tokens", "token_embd"),
    (r"model\.norm", "output_norm"),
    (r"lm_head", "output"),
    (r"model\.layers", "blk"),
    (r"input_layernorm", "attn_norm"),
    (r"pre_feedforward_layernorm", "ffn_norm"),
    (r"post_feedforward_layernorm", "post_ffw_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"self_attn\.(qkv|[qkv])_proj", r"attn_\1"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"self_attn\.sinks", "attn_sinks.weight"),
    (r"self_attn\.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    (r"self_attn\.(\w+_a)_layernorm", r"attn_\1_norm"),
    (r"self_attn\.(\w+_[ab])_proj", r"attn_\1"),
    (r"mlp\.shared_expert_gate", "ffn_gate_inp_shexp"),
    (r"mlp\.shared_experts?\.(\w+)_proj", r"ffn_\1_shexp"),
    (r"mlp\.gate\.e_score_correction_bias", "exp_probs_b.bias"),
    (r"(mlp|block_sparse_moe)\.gate\.", "ffn_gate_inp."),
    (r"mlp\.router", "ffn_gate_inp"),
    (r"mlp\.gate_up_proj", "ffn_up"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
    (r"mlp\.experts\.(\d+)\.(\w+)_proj", r"ffn_\2_exps.\1"),
    (r"block_sparse_moe\.experts\.(\d+)\.w1", r"ffn_gate_exps.\1"),
    (r"block_sparse_moe\.experts\.(\d+)\.w2", r"ffn_down_exps.\1"),
    (r"block_sparse_moe\.experts\.(\d+)\.w3", r"ffn_up_exps.\1"),
)
"""(pattern in a checkpoint's names, what GGUF has in its place)."""
JOINED = ("attn_k_b.weight", "attn_v_b.weight")
"""Endings of the matrices that the conversion puts together as one, in bfloat16."""
AFTER_ATTENTION = ("gemma2", "gemma3", "gpt-oss", "glm4moe")
"""Architectures in which GGUF keeps the name post_attention_norm."""


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
    folder: Path,
    model: str,
    kind_of: Callable[[str], GGMLQuantizationType],
    **keys: Any,
) -> tuple[Path, Path]:
    """Write a model of CONFIGS with random weights below ``folder``. kind_of: GGUF's name of a
    matrix -> its kind. keys: other values for its config. Returns (GGUF file, folder of a
    checkpoint with the same values in float32, whose config asks for bfloat16)."""
    config, architecture = CONFIGS[model] | keys, model.partition("/")[0]
    checkpoint = write_tiny(folder / "checkpoint", config)
    (weights,) = checkpoint.glob("*.safetensors")
    tensors = {name: _in_file(name, tensor) for name, tensor in load_file(weights).items()}
    stacks: defaultdict[str, list[Array]] = defaultdict(list)
    for name in sorted(tensors, key=_numbers):
        for old, view in _views(architecture, config, name, tensors[name]):
            stacks[re.sub(r"_exps\.\d+\.", "_exps.", old)].append(view)
    found: dict[str, Array] = _rope_factors(config)
    raw: dict[str, tuple[Array, GGMLQuantizationType]] = {}
    for old, views in stacks.items():
        is_stack = "_exps" in old and views[0].ndim == (1 if old.endswith("bias") else 2)
        whole = np.stack(views) if is_stack else np.ascontiguousarray(views[0])
        is_norm = old.endswith("norm.weight") and architecture.startswith("gemma")
        found[old] = whole + np.float32(1) if is_norm else whole
        if whole.ndim == 1 or "inp" in old or old.endswith("bias"):
            continue
        kind, order = kind_of(old), _row_order(architecture, config, old)
        blocks = _blocks(whole, kind)
        decoded = gguf.dequantize(blocks, kind)
        if old.endswith(JOINED):
            decoded = _rounded(decoded)
        for view, values in zip(views, decoded if is_stack else [decoded], strict=True):
            view[...] = values
        raw[old] = (blocks if order is None else blocks[order], kind)
    _save(checkpoint, weights, tensors)
    path = tiny_gguf.write(
        folder / f"{architecture}.gguf", found, metadata(model), arch=architecture, raw=raw
    )
    return path, checkpoint


def _in_file(name: str, tensor: Array) -> Array:
    """A tensor that may be written to, in values that bfloat16 can hold, as in trained models: the
    conversion keeps what is not in blocks in that type, except for a router's correction."""
    return tensor.copy() if name.endswith("e_score_correction_bias") else _rounded(tensor)


def _rounded(values: Array) -> Array:
    """The nearest values that bfloat16 can hold."""
    rounded: Array = from_numpy(values.copy()).to(bfloat16).float().numpy()
    return rounded


def _save(checkpoint: Path, weights: Path, tensors: dict[str, Array]) -> None:
    """Values of blocks stay in float32: bfloat16 would round them, which a runner in float32 does
    not."""
    whole = {name: from_numpy(np.ascontiguousarray(each)) for name, each in tensors.items()}
    save_file(whole, weights, {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (checkpoint / "config.json").write_text(json.dumps(config))


def _views(
    architecture: str, config: dict[str, Any], name: str, tensor: Array
) -> Iterator[tuple[str, Array]]:
    """(GGUF's name, view of the checkpoint's tensor that it has) for each tensor in the file."""
    old, last = _gguf_name(architecture, name), name.rpartition(".")[2]
    prefix = f"{old[: old.find('.', 4)]}.ffn_"
    if last == "gate_up_proj":
        yield f"{prefix}gate_exps.weight", tensor[:, :, ::2].swapaxes(1, 2)
        yield f"{prefix}up_exps.weight", tensor[:, :, 1::2].swapaxes(1, 2)
    elif last == "gate_up_proj_bias":
        yield f"{prefix}gate_exps.bias", tensor[:, ::2]
        yield f"{prefix}up_exps.bias", tensor[:, 1::2]
    elif last == "down_proj":
        yield f"{prefix}down_exps.weight", tensor.swapaxes(1, 2)
    elif last == "down_proj_bias":
        yield f"{prefix}down_exps.bias", tensor
    elif "kv_b_proj" in name:
        heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
        size = config["qk_nope_head_dim"]
        yield old.replace("kv_b", "k_b"), heads[:, :size].swapaxes(1, 2)
        yield old.replace("kv_b", "v_b"), heads[:, size:]
    else:
        yield old, tensor


def metadata(model: str) -> dict[str, Any]:
    """Every metadata key of the tiny file of this model."""
    config, architecture = CONFIGS[model], model.partition("/")[0]
    config = {"num_experts": config.get("num_local_experts"), **config}
    if "n_routed_experts" in config:
        config["num_experts"] = config["n_routed_experts"]
    if architecture == "gpt-oss":
        config["moe_intermediate_size"] = config["intermediate_size"]
    common = tiny_gguf.metadata(tiny_gguf.TinyLlama())
    found = {key: value for key, value in common.items() if key.startswith("tokenizer")}
    own = {key: config[name] for key, name in KEYS.items() if config.get(name) is not None}
    own |= _of_rope(config) | (_of_latent(config) if "kv_lora_rank" in config else {})
    if "n_routed_experts" in config and config["norm_topk_prob"]:
        own |= {"expert_weights_norm": True, "expert_gating_func": 2}
    return found | {f"{architecture}.{key}": value for key, value in own.items()}


def _of_rope(config: dict[str, Any]) -> dict[str, Any]:
    scaling = dict(config.get("rope_scaling") or {})
    part = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    found: dict[str, Any] = {"rope.dimension_count": part}
    scaling.setdefault("rope_type", scaling.get("type"))
    if "long_factor" in scaling:
        original = config["original_max_position_embeddings"]
        stretch = config["max_position_embeddings"] / original
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(stretch) / math.log(original))
    if "mscale_all_dim" in scaling:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    return found | {
        f"rope.scaling.{key}": scaling[name]
        for key, name in ROPE_KEYS.items()
        if scaling.get(name) is not None
    }


def _of_latent(config: dict[str, Any]) -> dict[str, Any]:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope,
    }


def _rope_factors(config: dict[str, Any]) -> dict[str, Array]:
    scaling = config.get("rope_scaling") or {}
    return {
        f"rope_factors_{length}.weight": np.array(scaling[f"{length}_factor"], np.float32)
        for length in ("long", "short")
        if f"{length}_factor" in scaling
    }


def _gguf_name(architecture: str, name: str) -> str:
    if architecture in AFTER_ATTENTION:
        name = name.replace("post_attention_layernorm", "post_attention_norm")
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
    """The blocks of ``values``; of a kind that the gguf package cannot make, random ones."""
    with contextlib.suppress(NotImplementedError):
        return gguf.quantize(values, kind)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.size)
    shape = (*values.shape[:-1], values.shape[-1] // block, block_bytes)
    raw = rng.integers(0, 256, shape, dtype=np.uint8)
    for at in BLOCK_KINDS[kind.name].scales:
        scales = rng.normal(0, 1e-4, shape[:-1]).astype(np.float16)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(*values.shape[:-1], -1)
