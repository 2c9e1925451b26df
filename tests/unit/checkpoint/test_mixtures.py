"""The sizes of mixtures of experts in config.json, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from setpoint.checkpoint.folder import mixtures
from setpoint.checkpoint.folder.configfile import ConfigFile
from setpoint.core.errors import CheckpointError
from setpoint.core.model import Mixture

DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def config(**keys: Any) -> ConfigFile:
    return ConfigFile(Path("config.json"), {"architectures": ["Some"], **keys})


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, {0, 1, 2, 3}),
        ({"mlp_only_layers": None}, {0, 1, 2, 3}),
        ({"mlp_only_layers": [0, 3]}, {1, 2}),
        ({"decoder_sparse_step": 2}, {1, 3}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {3}),
    ],
)
def test_layers_with_experts(keys: dict[str, Any], layers: set[int]) -> None:
    assert mixtures.qwen(config(**QWEN, **keys), 4) == Mixture(8, 2, 48, frozenset(layers))


def test_shared_experts_and_other_names() -> None:
    shared = config(**QWEN, shared_expert_intermediate_size=96)
    expected = Mixture(8, 2, 48, frozenset({0}), 96, shared_is_gated=True)
    assert mixtures.qwen(shared, 1) == expected
    mixtral = config(num_local_experts=4, num_experts_per_tok=2, intermediate_size=80)
    assert mixtures.mixtral(mixtral, 1) == Mixture(4, 2, 80, frozenset({0}))
    olmoe = config(num_experts=4, num_experts_per_tok=2, intermediate_size=80)
    assert mixtures.olmoe(olmoe, 1) == Mixture(4, 2, 80, frozenset({0}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_experts": 0}, "'num_experts' must be a positive integer, not 0"),
        ({"num_experts": 1 << 20}, "'num_experts' is 1048576; the largest supported value is 4096"),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9, but there are 8 experts"),
        ({"moe_intermediate_size": -1}, "'moe_intermediate_size' must be a positive integer"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' must be a positive integer"),
        ({"mlp_only_layers": ["a"]}, "'mlp_only_layers' must be a list of layers"),
        ({"mlp_only_layers": 0}, "must be a list of layers from 0 to 3, not 0"),
        ({"mlp_only_layers": ""}, "must be a list of layers from 0 to 3, not ''"),
        ({"mlp_only_layers": False}, "must be a list of layers from 0 to 3, not False"),
        ({"mlp_only_layers": {}}, "must be a list of layers from 0 to 3, not {}"),
        ({"mlp_only_layers": [-1]}, "'mlp_only_layers' must be a list of layers from 0 to 3"),
        ({"mlp_only_layers": [4]}, "'mlp_only_layers' must be a list of layers from 0 to 3"),
        ({"shared_expert_intermediate_size": "x"}, "'shared_expert_intermediate_size' must be"),
    ],
)
def test_what_cannot_be_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        mixtures.qwen(config(**{**QWEN, **keys}), 4)


@pytest.mark.parametrize("value", [False, True, "", [], {}, 0.0, "1", -1, 1 << 63])
@pytest.mark.parametrize("key", ["first_k_dense_replace", "n_shared_experts"])
def test_counts_are_integers_of_a_possible_size(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{key!r} must be an integer from 0 to 4096, not "):
        mixtures.deepseek(config(**DEEPSEEK, **{key: value}), 4)


def test_the_shared_experts_together_have_a_possible_size() -> None:
    keys = {**DEEPSEEK, "moe_intermediate_size": 1 << 28, "n_shared_experts": 2}
    with pytest.raises(CheckpointError, match="'n_shared_experts' must be an integer from 0 to 1,"):
        mixtures.deepseek(config(**keys), 4)


def test_null_counts_as_none() -> None:
    keys = {**DEEPSEEK, "first_k_dense_replace": None, "n_shared_experts": None}
    assert mixtures.deepseek(config(**keys), 2) == Mixture(8, 2, 48, frozenset({0, 1}))


def test_shares_of_experts_that_a_step_reads() -> None:
    mixture = Mixture(128, 8, 768, frozenset(range(48)))
    assert mixture.used(1) == 8 / 128
    assert mixture.used(2) == pytest.approx(1 - (120 / 128) ** 2)
    assert 0.98 < mixture.used(64) < 1
