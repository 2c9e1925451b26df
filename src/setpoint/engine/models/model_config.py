"""Reads a model's config.json for its declaration: with types, and with a check that every key that
changes the computation is read.

Knows keys and their values; knows no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from setpoint.core.errors import CheckpointError
from setpoint.core.model import MAX_LAYERS, Latent, Mixture, ModelSpec
from setpoint.engine.kernels.ops import GELU_TANH, SILU, GateActivation

GATED = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}
"""Name of an activation in config.json -> that of a gated MLP."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "layer_types": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "rope_local_base_freq": (),
    "attention_multiplier": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "clip_qkv": (),
    "partial_rotary_factor": (1.0,),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "rope_interleave": (False,),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "dual_chunk_attention_config": (),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "n_group": (1,),
    "kv_lora_rank": (),
    "q_lora_rank": (),
    "scoring_func": ("softmax",),
    "moe_router_activation": ("softmax",),
    "moe_router_activation_func": ("softmax",),
    "norm_topk_prob": (True,),
    "routed_scaling_factor": (1.0,),
    "topk_method": ("greedy",),
    "swiglu_alpha": (),
    "swiglu_limit": (),
}
"""Keys that can change the computation -> the values that do not; null and an absent key never
change anything. A declaration that reads a key is responsible for it. If it does not read the key,
every other value is refused."""

ELSEWHERE = "--model-impl transformers may serve it"
SHOWN_CHARS = 60
"""Most characters of a refused value that an error message shows."""
FP32 = torch.finfo(torch.float32)
MAX_COUNT = (1 << 31) - 1
"""Largest number of positions or layers accepted."""


class ConfigReader:
    """Typed access to a config; it remembers which keys were read. Errors name the architecture,
    the key and the value."""

    def __init__(self, architecture: str, config: Mapping[str, Any]) -> None:
        self._architecture = architecture
        self._config = config
        self._read: set[str] = set()

    def refuse(self, key: str, why: str = "") -> NoReturn:
        """Raise CheckpointError: the model is not supported with the value of this key."""
        value = repr(self._config.get(key))
        value = value if len(value) <= SHOWN_CHARS else value[:SHOWN_CHARS] + "…"
        raise CheckpointError(
            f"{self._architecture} with {key!r} = {value} in config.json is not"
            f" supported{why and f': {why}'}."
        )

    def flag(self, key: str, *, default: bool = False) -> bool:
        """The value of a key that must be true or false; ``default`` if it is absent."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return value

    def number(self, key: str, default: float) -> float:
        """The value of a key that must be a number above zero, which fp32 can hold."""
        value = self._get(key, default)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not FP32.tiny <= value <= FP32.max
        ):
            self.refuse(key, "it must be a number above zero in the range of fp32")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """The value of a key that must be a number above zero; None if it is absent."""
        return None if self._get(key, None) is None else self.number(key, 0.0)

    def count(self, key: str, default: int, *, low: int = 0, high: int = MAX_COUNT) -> int:
        """The value of a key that must be an integer from ``low`` to ``high``."""
        value = self._get(key, default)
        if type(value) is not int or value < low:
            self.refuse(key, f"it must be an integer of at least {low}")
        if value > high:
            self.refuse(key, f"the largest supported value is {high}")
        return value

    def choice(self, key: str, default: str, *others: str) -> str:
        """The value of a key that must be ``default``, which an absent key means, or one of
        ``others``."""
        value = self._get(key, default)
        if value not in (default, *others):
            self.refuse(key, f"supported values are {', '.join(map(repr, (default, *others)))}")
        return str(value)

    def latent(self, spec: ModelSpec) -> Latent:
        """The sizes of the model's latent attention, which ``spec`` has."""
        self._read.update(("kv_lora_rank", "q_lora_rank"))
        if spec.latent is None:
            self.refuse("model_type", "its latent attention goes by another name")
        return spec.latent

    def further_layers(self, spec: ModelSpec) -> tuple[str, ...]:
        """Prefixes of the tensors of layers after the last, which predict further tokens and are
        not used."""
        count = self.count("num_nextn_predict_layers", 0, high=MAX_LAYERS)
        return tuple(f"model.layers.{spec.num_layers + index}." for index in range(count))

    def windows(self, spec: ModelSpec, *keys: str) -> tuple[int | None, ...]:
        """For each layer, the number of positions that a token sees; None: all. ``spec`` has them,
        computed from ``keys``, which count as read."""
        self._read.update(keys)
        return spec.windows or (None,) * spec.num_layers

    def mixture(self, spec: ModelSpec) -> Mixture:
        """The model's experts, which ``spec`` has."""
        self._read.update(
            ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts")
        )
        if spec.mixture is None:
            self.refuse("model_type", "its mixture of experts goes by another name")
        return spec.mixture

    def gated(self, key: str = "hidden_act", default: str = "silu") -> GateActivation:
        """The gate of a gated MLP with this activation."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in GATED:
            self.refuse(key, f"supported values are {', '.join(GATED)}; {ELSEWHERE}")
        return GATED[value]

    def refuse_unread(self) -> None:
        """Raise CheckpointError if a key of NEUTRAL that was not read has a value that changes the
        computation."""
        for key, neutral in NEUTRAL.items():
            value = self._config.get(key)
            if key not in self._read and value is not None and value not in neutral:
                self.refuse(key, ELSEWHERE)

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._config.get(key)
        return default if value is None else value
