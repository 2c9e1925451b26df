"""Divides a model among ranks before its weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from setpoint.core.expert_placement import Placement
from setpoint.core.model import ModelSpec
from setpoint.engine.parallel.group import Group, head_spans


def rank_spec(spec: ModelSpec, rank: int, size: int) -> ModelSpec:
    """The spec with the heads that one of ``size`` ranks computes and caches."""
    q, kv = head_spans(spec.num_heads, spec.num_kv_heads, size)[rank]
    return replace(spec, num_heads=q[1] - q[0], num_kv_heads=kv[1] - kv[0])


def cached_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """The spec with the heads of K and V that all of ``size`` ranks cache together: ranks that
    share one have it each."""
    return replace(spec, num_kv_heads=max(spec.num_kv_heads, size))


def mixtures(model: nn.Module) -> list[Any]:
    """The model's layers of experts (``engine.layers.experts``)."""
    return [module for module in model.modules() if hasattr(module, "expert_slots")]


def split_model(
    model: nn.Module,
    group: Group,
    placements: Sequence[Placement] | None = None,
    *,
    whole_mlps: bool = False,
    only_experts: bool = False,
) -> None:
    """Leave each layer the part that this rank computes: of its outputs or, if the group adds
    partial sums and the layer allows it, of its inputs. Layers without a method ``split`` are the
    same on all ranks.

    placements: for each layer with experts, the expert in each slot of all ranks; None: each rank
    has a part of every expert. whole_mlps: leave every rank all of the other MLPs.
    only_experts: leave every rank all of what is not in a layer of experts.
    """
    undivided = set[nn.Module]()
    if only_experts:
        divided = {each for mixture in mixtures(model) for each in mixture.modules()}
        undivided.update(set(model.modules()) - divided)
    if placements is not None:
        for module, placement in zip(mixtures(model), placements, strict=True):
            each = len(placement) // group.size
            module.expert_slots.divide(placement, (group.rank * each, (group.rank + 1) * each))
            undivided.update(module.experts.modules())
    if whole_mlps:
        for module in model.modules():
            if getattr(module, "is_mlp", False):
                undivided.update(module.modules())
    for module in model.modules():
        if module in undivided:
            continue
        if group.sums and getattr(module, "divides_inputs", False):
            module.split_inputs(group.rank, group.size)
        elif hasattr(module, "split"):
            module.split(group.rank, group.size)
