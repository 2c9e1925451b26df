"""A config that asks for something a declaration does not compute ends at start-up with one
sentence that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import CheckpointError
from setpoint.engine.models.model_config import NEUTRAL
from setpoint.engine.models.model_registry import build_model
from setpoint_testing.goldens import GOLDENS

CONFIGS = {golden.name: golden.config for golden in GOLDENS}
SOME = {
    "llama": "llama: two queries per key",
    "qwen2": "qwen2: 2.5, untied",
    "qwen3": "qwen3: tied",
    "phi3": "phi3: 4, no window",
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def build(folder: Path, family: str, **changes: Any) -> Any:
    """On the meta device: no weights are needed."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[SOME[family]] | changes))
    return build_model(read_spec(folder))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "qwen2",
            {"attention_bias": True},
            (
                "Qwen2ForCausalLM with 'attention_bias' = True in config.json is not supported:"
                " --model-impl transformers"
            ),
        ),
        (
            "qwen2",
            {"use_sliding_window": 1},
            "config.json: 'use_sliding_window' must be true or false, not 1.",
        ),
        (
            "qwen2",
            {"sliding_window": -2},
            "config.json: 'sliding_window' must be a positive integer, not -2.",
        ),
        (
            "qwen2",
            {"max_window_layers": -1},
            "'max_window_layers' must be an integer of at least 0, not -1.",
        ),
        (
            "qwen2",
            {"layer_types": ["full_attention"]},
            "'layer_types' must name 2 layers, each sliding_attention or full_attention",
        ),
        (
            "qwen2",
            {"layer_types": ["full_attention", "linear_attention"]},
            "'layer_types' must name 2 layers",
        ),
        ("qwen2", {"is_causal": False}, "Qwen2ForCausalLM with 'is_causal' = False"),
        (
            "qwen2",
            {
                "dual_chunk_attention_config": {
                    "chunk_size": 262144,
                    "local_size": 8192,
                    "why": "x" * 99,
                }
            },
            "…",
        ),
        ("qwen3", {"mlp_bias": True}, "Qwen3ForCausalLM with 'mlp_bias' = True"),
        (
            "qwen3",
            {"hidden_act": "relu"},
            "'hidden_act' = 'relu' in config.json is not supported: supported values are silu, ",
        ),
        ("qwen3", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' = 0.5"),
        (
            "phi3",
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "this architecture supports only the type longrope",
        ),
        (
            "phi3",
            {"rope_scaling": {**LONGROPE, "long_factor": [2.0] * 7}},
            "'long_factor' must be a list of 8 positive numbers",
        ),
        (
            "phi3",
            {"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 7 + [0]}},
            "'short_factor' must be a list of 8 positive",
        ),
        ("phi3", {"lm_head_bias": True}, "'lm_head_bias' = True"),
        (
            "llama",
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "must be below",
        ),
        (
            "llama",
            {"rope_theta": float("inf")},
            "'rope_theta' must be a number above zero, not 'Infinity'",
        ),
        ("llama", {"rope_scaling": {"type": "longrope"}}, "'longrope' lacks 'short_factor'"),
        ("llama", {"rope_theta": 0.5}, "'rope_theta' must be above 1, not 0.5"),
        (
            "llama",
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "needs at least 4 rotated dimensions",
        ),
        ("llama", {"hidden_act": ["silu"]}, "'hidden_act' = ['silu']"),
        (
            "phi3",
            {"original_max_position_embeddings": "4k"},
            "must be an integer from 2 to 2147483647, not '4k'",
        ),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    build(tmp_path, family)
    with pytest.raises(CheckpointError) as caught:
        build(tmp_path, family, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 240


@pytest.mark.parametrize("family", SOME)
def test_neutral_values_are_fine(tmp_path: Path, family: str) -> None:
    build(tmp_path, family, **{key: values[0] for key, values in NEUTRAL.items() if values})
