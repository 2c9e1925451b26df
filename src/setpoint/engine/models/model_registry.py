"""Maps an architecture of config.json to the declaration that builds it."""

from __future__ import annotations

import torch
from torch import nn

from setpoint.core.errors import UnsupportedModelError
from setpoint.core.model import ModelSpec
from setpoint.engine.kernels.kernel_registry import resolve
from setpoint.engine.layers.linear import NoHead
from setpoint.engine.models.model_config import ConfigReader

MODELS = {
    "DeepseekV2ForCausalLM": "setpoint.engine.models.deepseek:deepseek_v2",
    "DeepseekV3ForCausalLM": "setpoint.engine.models.deepseek:deepseek_v3",
    "Gemma2ForCausalLM": "setpoint.engine.models.gemma:gemma2",
    "Gemma3ForCausalLM": "setpoint.engine.models.gemma:gemma3",
    "Glm4MoeForCausalLM": "setpoint.engine.models.mixtures:glm4_moe",
    "GptOssForCausalLM": "setpoint.engine.models.gpt_oss:gpt_oss",
    "LlamaForCausalLM": "setpoint.engine.models.llama:llama",
    "MistralForCausalLM": "setpoint.engine.models.llama:mistral",
    "MixtralForCausalLM": "setpoint.engine.models.mixtures:mixtral",
    "OlmoeForCausalLM": "setpoint.engine.models.mixtures:olmoe",
    "Phi3ForCausalLM": "setpoint.engine.models.phi3:phi3",
    "Qwen2ForCausalLM": "setpoint.engine.models.qwen:qwen2",
    "Qwen2MoeForCausalLM": "setpoint.engine.models.mixtures:qwen2_moe",
    "Qwen3ForCausalLM": "setpoint.engine.models.qwen:qwen3",
    "Qwen3MoeForCausalLM": "setpoint.engine.models.mixtures:qwen3_moe",
}
"""Architecture -> ``build(spec, config)``, which returns a module with ``rotaries``,
``forward(input_ids, ctx) -> hidden`` and ``logits(hidden, backends)``."""

NEARLY = {
    "MoeForCausalLM": "it is a mixture of experts of another kind",
    "MoEForCausalLM": "it is a mixture of experts of another kind",
}
"""Endings of names of architectures that resemble supported ones -> why no declaration here
supports them."""


def is_native(spec: ModelSpec) -> bool:
    return _name(spec) in MODELS


def _name(spec: ModelSpec) -> str:
    """The model's key in MODELS. A decoder without a head that serves embeddings ("MistralModel")
    has the key of its language model."""
    bare = spec.pooling is not None and spec.architecture.endswith("Model")
    return f"{spec.architecture.removesuffix('Model')}ForCausalLM" if bare else spec.architecture


def build_model(spec: ModelSpec) -> nn.Module:
    """The model on the meta device: shapes without memory. Raises CheckpointError for an
    architecture or a config that no declaration supports."""
    if not is_native(spec):
        why = next(
            (f" ({what})" for ending, what in NEARLY.items() if spec.architecture.endswith(ending)),
            "",
        )
        raise UnsupportedModelError(
            f"Architecture {spec.architecture!r} is not supported{why}; supported:"
            f" {', '.join(sorted(MODELS))}.",
            architecture=spec.architecture,
            supported=MODELS.keys(),
        )
    config = ConfigReader(spec.architecture, spec.config)
    with torch.device("meta"):
        model = resolve(MODELS[_name(spec)])(spec, config)
        if spec.pooling is not None:
            model.lm_head = NoHead()
    config.refuse_unread()
    windows = tuple(variant.window for _, variant in sorted(model.variants.items()))
    assert windows == (spec.windows or (None,) * spec.num_layers), "pages are freed by spec.windows"
    return model
