"""Which architecture of a config.json is built by which class."""

from __future__ import annotations

import torch
from torch import nn

from setpoint.core.errors import CheckpointError
from setpoint.core.model import ModelSpec
from setpoint.engine.kernels.registry import resolve

MODELS = {
    "LlamaForCausalLM": "setpoint.engine.models.llama:Llama",
}
"""Architecture -> class with ``__init__(spec)``, ``rotary``, ``forward(input_ids, ctx) -> hidden`` and ``logits(hidden)``."""


def build_model(spec: ModelSpec) -> nn.Module:
    """The model on the meta device: shapes without memory. CheckpointError for an architecture not in the table."""
    if spec.architecture not in MODELS:
        raise CheckpointError(f"Architecture {spec.architecture!r} is not supported; supported: {', '.join(sorted(MODELS))}.")
    with torch.device("meta"):
        return resolve(MODELS[spec.architecture])(spec)
