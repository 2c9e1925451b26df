"""A config of a mixture of experts that asks for something else than what is computed, or for a
number that fp32 cannot hold, ends at start-up with one sentence that names the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import CheckpointError
from setpoint.engine.models.model_registry import build_model
from setpoint_testing.goldens import GOLDENS

CONFIGS = {golden.name.partition(":")[0]: golden.config for golden in GOLDENS}
CORRECTED = ("deepseek_v3", "glm4_moe")
MIXTURES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", *CORRECTED, "gpt_oss")
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
UNHELD = (1e300, 1e39, 1e-300, 1e-39)
"""Positive numbers that fp32 cannot hold, or not with its full precision."""


def build(folder: Path, family: str, **changes: Any) -> Any:
    """On the meta device: no weights are needed."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[family] | changes))
    return build_model(read_spec(folder))


def refusal(folder: Path, family: str, **changes: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        build(folder, family, **changes)
    return str(caught.value)


@pytest.mark.parametrize("family", CORRECTED)
@pytest.mark.parametrize("count", [4097, (1 << 31) - 1])
def test_no_more_further_layers_than_layers_can_be(tmp_path: Path, family: str, count: int) -> None:
    """Red before: as many names as this were made, which took all the memory."""
    message = refusal(tmp_path, family, num_nextn_predict_layers=count)
    assert f"'num_nextn_predict_layers' = {count}" in message
    assert "the largest supported value is 4096" in message


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("key", ["mscale", "mscale_all_dim"])
@pytest.mark.parametrize("value", [1e308, 1001.0, 1e-300, 0, -1, [1], "1", True, False, "", []])
def test_weights_of_the_attention_factor(tmp_path: Path, family: str, key: str, value: Any) -> None:
    rope = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    build(tmp_path, family, rope_scaling=rope)
    assert f"{key!r}" in refusal(tmp_path, family, rope_scaling={**rope, key: value})


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("value", [{"a": 1}, 0, "", False, []])
def test_a_scaling_without_a_type(tmp_path: Path, family: str, value: Any) -> None:
    assert "'rope_scaling' must " in refusal(tmp_path, family, rope_scaling=value)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("deepseek_v2", "routed_scaling_factor"),
        ("deepseek_v3", "routed_scaling_factor"),
        ("glm4_moe", "routed_scaling_factor"),
        ("gpt_oss", "swiglu_limit"),
        ("gpt_oss", "swiglu_alpha"),
    ],
)
@pytest.mark.parametrize("value", UNHELD)
def test_numbers_that_fp32_cannot_hold(tmp_path: Path, family: str, key: str, value: float) -> None:
    message = refusal(tmp_path, family, **{key: value})
    assert f"{key!r} = {value}" in message
    assert "a number above zero in the range of fp32" in message


@pytest.mark.parametrize("value", UNHELD)
def test_a_factor_of_a_scaling_that_fp32_cannot_hold(tmp_path: Path, value: float) -> None:
    rope = {**YARN, "attention_factor": value}
    assert "'attention_factor' must be" in refusal(tmp_path, "deepseek_v3", rope_scaling=rope)


@pytest.mark.parametrize("value", [1e300, 10**400, True])
def test_stretch_factors_that_fp32_cannot_hold(tmp_path: Path, value: float) -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [value] * 8}
    message = refusal(tmp_path, "deepseek_v3", rope_scaling=rope)
    assert "'long_factor' must be a list of 8 positive numbers in the range of fp32" in message


def test_an_original_length_that_positions_cannot_have(tmp_path: Path) -> None:
    bands = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"type": "llama3", **bands, "original_max_position_embeddings": 10**400}
    message = refusal(tmp_path, "deepseek_v3", rope_scaling=rope)
    assert "'original_max_position_embeddings' must be an integer from 2 to 2147" in message


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("value", [False, "hash", 5])
def test_routers_that_always_normalise(tmp_path: Path, family: str, value: Any) -> None:
    build(tmp_path, family, norm_topk_prob=True)
    assert "'norm_topk_prob' = " in refusal(tmp_path, family, norm_topk_prob=value)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("key", ["moe_router_activation", "moe_router_activation_func"])
def test_other_names_of_the_routers_scores(tmp_path: Path, family: str, key: str) -> None:
    ours, other = ("sigmoid", "softmax") if family in CORRECTED else ("softmax", "sigmoid")
    build(tmp_path, family, **{key: ours})
    for value in (other, "hash", 5, ["softmax"]):
        assert f"{key!r} = " in refusal(tmp_path, family, **{key: value})
