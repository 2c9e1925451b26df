"""Keys and values of config.json that mean the same: names that transformers equates
(``attribute_map`` of its configuration classes), and values that mean none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setpoint.checkpoint.folder.configfile import ConfigFile, short_repr

DEEPSEEK_V3 = {
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
EQUAL_NAMES: Mapping[str, Mapping[str, str]] = {
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe": DEEPSEEK_V3,
    "gpt_oss": {"num_experts": "num_local_experts"},
    "kimi_k2": DEEPSEEK_V3,
    "mixtral": {"num_experts": "num_local_experts"},
    "olmoe": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
"""model_type -> another name of a key -> the name that Setpoint reads. transformers may write
either, and which one changes between its versions."""
NONE_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (0,),
    "eos_token_id": (-1,),
    "final_logit_softcapping": (0,),
    "head_dim": (0,),
    "layer_types": ([],),
    "q_lora_rank": (0,),
    "rope_parameters": ({},),
    "rope_scaling": ({},),
    "shared_expert_intermediate_size": (0,),
    "sliding_window": (0, -1),
}
"""Key -> the values that mean none, as null does; false does where 0 does."""


def usual_config(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config at ``path`` with every key under the name that Setpoint reads, and null for none.
    Raises CheckpointError if two names of a key have different values."""
    found = dict(config)
    for other, usual in EQUAL_NAMES.get(str(config.get("model_type")), {}).items():
        if other not in found:
            continue
        value = found.pop(other)
        if found.setdefault(usual, value) != value:
            ConfigFile(path, found).fail(
                other,
                f"is {short_repr(value)} and {usual!r} is {short_repr(found[usual])}, but both are"
                " names of the same number; remove the one that is wrong",
            )
    return {
        key: None if value in NONE_VALUES.get(key, ()) else value for key, value in found.items()
    }
