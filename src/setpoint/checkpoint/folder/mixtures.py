"""Reads the sizes of mixtures of experts from config.json."""

from __future__ import annotations

from dataclasses import replace

from setpoint.checkpoint.folder.configfile import MAX_DIMENSION, ConfigFile, short_repr
from setpoint.core.model import MAX_LAYERS, Mixture

MAX_EXPERTS = 4096


def none(config: ConfigFile, num_layers: int) -> Mixture | None:
    """A model without experts."""
    return None


def mixtral(config: ConfigFile, num_layers: int) -> Mixture:
    """Every layer has experts, of the model's intermediate size."""
    return _mixture(config, "num_local_experts", "intermediate_size", range(num_layers))


def gpt_oss(config: ConfigFile, num_layers: int) -> Mixture:
    """The experts are those of Mixtral, with biases."""
    return replace(mixtral(config, num_layers), biases=True)


def olmoe(config: ConfigFile, num_layers: int) -> Mixture:
    return _mixture(config, "num_experts", "intermediate_size", range(num_layers))


def qwen(config: ConfigFile, num_layers: int) -> Mixture:
    """Qwen2-MoE and Qwen3-MoE: the layers that ``decoder_sparse_step`` and ``mlp_only_layers``
    leave, and in Qwen2-MoE a shared expert."""
    step = config.positive("decoder_sparse_step", 1)
    dense = config.config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(
        type(layer) is int and 0 <= layer < num_layers for layer in dense
    ):
        config.fail(
            "mlp_only_layers",
            f"must be a list of layers from 0 to {num_layers - 1}, not {short_repr(dense)}",
        )
    layers = [
        layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
    ]
    shared = 0
    if config.config.get("shared_expert_intermediate_size") is not None:
        shared = config.positive("shared_expert_intermediate_size")
    mixture = _mixture(config, "num_experts", "moe_intermediate_size", layers)
    return replace(mixture, shared_size=shared, shared_is_gated=shared > 0)


def deepseek(config: ConfigFile, num_layers: int) -> Mixture:
    """DeepSeek-V2: every ``moe_layer_freq``-th layer from ``first_k_dense_replace`` on, with
    ``n_shared_experts`` experts that every token uses."""
    step = config.positive("moe_layer_freq", 1)
    first = _count(config, "first_k_dense_replace", MAX_LAYERS)
    layers = [layer for layer in range(first, num_layers) if layer % step == 0]
    mixture = _mixture(config, "n_routed_experts", "moe_intermediate_size", layers)
    num_shared = _count(config, "n_shared_experts", min(MAX_EXPERTS, MAX_DIMENSION // mixture.size))
    return replace(mixture, shared_size=mixture.size * num_shared)


def corrected(config: ConfigFile, num_layers: int) -> Mixture:
    """DeepSeek-V3 and GLM-4.5: the same with a correction of the scores."""
    return replace(deepseek(config, num_layers), is_corrected=True)


def _count(config: ConfigFile, key: str, at_most: int) -> int:
    """The value of ``key``, an integer from 0 to ``at_most``; 0 if it is absent or null."""
    value = config.config.get(key)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= at_most:
        config.fail(key, f"must be an integer from 0 to {at_most}, not {short_repr(value)}")
    return value


def _mixture(
    config: ConfigFile,
    num_key: str,
    size_key: str,
    layers: range | list[int],
) -> Mixture:
    num_experts = config.positive(num_key, at_most=MAX_EXPERTS)
    num_chosen = config.positive("num_experts_per_tok")
    if num_chosen > num_experts:
        config.fail("num_experts_per_tok", f"is {num_chosen}, but there are {num_experts} experts")
    size = config.positive(size_key)
    return Mixture(num_experts, num_chosen, size, frozenset(layers))
