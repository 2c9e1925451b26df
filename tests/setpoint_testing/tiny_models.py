"""Tiny random Llama models as folders that transformers and the engine both load: config.json and
model.safetensors.

Works with numpy only. Writes no tokenizer.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
"""head_dim is larger than hidden_size / num_attention_heads on purpose."""


def write_tiny_llama(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write the model to ``folder``, which is made if it is missing; returns the folder. overrides:
    keys of config.json.

    Weights have a spread of 1.5 / sqrt(inputs), so that logits differ by several units and greedy
    ids wander.
    """
    config = TINY | overrides
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    rng = np.random.default_rng(seed)
    save_file(
        {name: draw(rng, name, shape) for name, shape in _shapes(config).items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Random content for the checkpoint tensor ``name``."""
    if len(shape) == 1:
        return rng.normal(1.0 if "norm" in name else 0.0, 0.1, shape).astype(np.float32)
    return rng.normal(0.0, 1.0 if "embed" in name else 1.5 / math.sqrt(shape[-1]), shape).astype(
        np.float32
    )


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Checkpoint name -> shape of every tensor."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    linear = {
        "self_attn.q_proj": (q_size, size, "attention_bias"),
        "self_attn.k_proj": (kv_size, size, "attention_bias"),
        "self_attn.v_proj": (kv_size, size, "attention_bias"),
        "self_attn.o_proj": (size, q_size, "attention_bias"),
        "mlp.gate_proj": (inner, size, "mlp_bias"),
        "mlp.up_proj": (inner, size, "mlp_bias"),
        "mlp.down_proj": (size, inner, "mlp_bias"),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], size)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if config[bias]:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (size,)
    shapes["model.norm.weight"] = (size,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], size)
    return shapes
