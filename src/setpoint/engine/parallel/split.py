"""Divides a model among ranks before its weights are loaded."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from setpoint.core.model import ModelSpec
from setpoint.engine.parallel.group import spans


def rank_spec(spec: ModelSpec, rank: int, size: int) -> ModelSpec:
    """The spec with the heads that one of ``size`` ranks computes and caches. The K and V heads are
    divided, and each takes its heads of q along."""
    begin, end = spans(spec.num_kv_heads, size)[rank]
    share = spec.num_heads // spec.num_kv_heads
    return replace(spec, num_heads=(end - begin) * share, num_kv_heads=end - begin)


def split_model(model: nn.Module, rank: int, size: int) -> None:
    """Leave each layer the part of its outputs that one of ``size`` ranks computes. Layers with
    outputs to divide have a method ``split``; the others are the same on all ranks."""
    for module in model.modules():
        if hasattr(module, "split"):
            module.split(rank, size)
