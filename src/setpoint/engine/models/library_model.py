"""A decoder of the transformers library that runs on our attention, paged cache and linear layers.

It relies on the library's attention interface: layers look up their attention function by name and
pass it q and k (rotated), v, and the layer's scale, window and soft cap; the rest of the layer is
the library's. T: tokens of the step, C: hidden size, H heads of size D. This module imports nothing
of the library, and knows nothing of slots or plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from setpoint.core.cache_scales import LayerScales
from setpoint.core.model import ModelSpec
from setpoint.engine.attention.attention_backend import AttentionVariant
from setpoint.engine.layers.attention import store_and_attend
from setpoint.engine.layers.context import Backends, ForwardContext
from setpoint.engine.layers.opaque import attend
from setpoint.engine.models.transformers_windows import WindowCheck
from setpoint.engine.quant.linear_method import LinearMethod, PackedWeight

SEAT = "setpoint_seat"
"""The attribute of an attention layer that holds our ``Seat``. An attribute is needed because not
every layer passes keyword arguments through."""

TRIAL_TOKENS = 6
"""Number of tokens whose logits the library itself computes at load, for ``executor.trial``."""

WITHOUT_EFFECT = {
    *(
        "dropout",
        "position_ids",
        "use_cache",
        "cache_position",
        "position_embeddings",
        "past_key_values",
        "return_dict",
    ),
    *("output_attentions", "output_hidden_states", "output_router_logits", "layer_idx"),
}
"""Keyword arguments of an attention call that change nothing here: there is no dropout, the
library's cache is not used, and rotation is already done."""


class Undrivable(Exception):
    """Raised if the library's layers cannot be run on this engine. The message is the reason,
    without the model's name."""


@dataclass(slots=True)
class Seat:
    """Gives our attention function and linear layers access to the context of the call. Every
    attention layer of a model holds the same Seat, as the attribute SEAT."""

    ctx: Backends | None = None
    """The context of the current call: a ForwardContext in the decoder, only the backends in the
    head."""
    layers: list[int] = field(default_factory=list)
    """The layers that called attention in this pass, in the order of the calls."""
    variants: dict[int, AttentionVariant] = field(default_factory=dict)
    """Layer -> the variant that its first call asked for."""
    cache_scales: LayerScales = field(default_factory=dict)
    """Scales of the KV cache; layers without them have 1."""


class TransformersModel:
    """The model that the runner runs: for hidden states the library's decoder, and for logits its
    causal-LM class with a stand-in for the decoder."""

    rotaries = ()
    """Empty, because the library rotates by itself."""

    def __init__(
        self, causal_lm: nn.Module, spec: ModelSpec, expected: torch.Tensor, method: LinearMethod
    ) -> None:
        """Take ``causal_lm`` apart, and pass its linear layers to the method. expected: its own
        logits [V] after ``trial_ids``."""
        self.expected = expected
        self.trial_ids = trial_ids(spec)
        self._layers = list(range(spec.num_layers))
        self._declared = WindowCheck(causal_lm.config, spec)
        self._seat = Seat()
        self.num_bytes = _pack_linears(causal_lm, method, self._seat)
        """Bytes of all weights."""
        for module in causal_lm.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, SEAT, self._seat)
        self.decoder = _decoder_of(causal_lm)
        self._causal_lm = causal_lm
        name = next(name for name, module in causal_lm.named_modules() if module is self.decoder)
        _replace(causal_lm, name, _StandIn())

    def modules(self) -> Iterator[nn.Module]:
        """All modules, those of the head after those of the decoder, as in every other model."""
        yield from self.decoder.modules()
        yield from self._causal_lm.modules()

    def __call__(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids [T] -> the last hidden states [T, C], normalised."""
        seat = self._seat
        seat.ctx, seat.layers = ctx, []
        hidden = self._decode(input_ids, ctx)
        seat.ctx = None
        if torch.compiler.is_compiling():  # the trial has made the checks below
            return hidden
        if sorted(seat.layers) != self._layers:
            raise Undrivable(
                f"the attention interface was called by layers {seat.layers}, not once by each of"
                f" its {len(self._layers)}"
            )
        if why := self._declared.contradiction(seat.variants):
            raise Undrivable(why)
        return hidden

    def _decode(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        ids, positions = input_ids[None].long(), ctx.batches[0].positions[None]
        return self.decoder(
            input_ids=ids, position_ids=positions, use_cache=False, return_dict=True
        ).last_hidden_state[0]

    @property
    def variants(self) -> dict[int, AttentionVariant]:
        """Layer -> its attention variant, known after the trial."""
        return self._seat.variants

    def take_cache_scales(self, scales: LayerScales) -> None:
        """Store K and V of these layers in a cache in fp8 divided by their scales. Call it before
        the first step."""
        self._seat.cache_scales = scales

    def logits(self, hidden: torch.Tensor, backends: Backends) -> torch.Tensor:
        """hidden [S, C] -> [S, V], including everything that the library's head does (scales, soft
        caps)."""
        self._seat.ctx = backends
        logits = self._causal_lm(
            inputs_embeds=hidden[None], use_cache=False, return_dict=True
        ).logits[0]
        self._seat.ctx = None
        return logits


class _StandIn(nn.Module):
    """Replaces the decoder, so that the library's code after the decoder runs on hidden states that
    already exist."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _Output:
        return _Output(inputs_embeds)


class _Output:
    """A decoder's output that has only hidden states; every other attribute is None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class PackedLinear(nn.Module):
    """Replaces an ``nn.Linear``: x [..., K] -> [..., N]."""

    def __init__(self, packed: PackedWeight, weight: torch.Tensor, seat: Seat) -> None:
        super().__init__()
        self.packed = packed
        self.seat = seat
        self.out_features = len(weight)
        self.weight = torch.empty_like(weight, device="meta")
        """A weight without data, for layers that read its dtype or shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ctx = self.seat.ctx
        assert ctx is not None, "outside a forward pass"
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return ctx.multiply(self.packed, rows).view(*x.shape[:-1], -1)


def _pack_linears(causal_lm: nn.Module, method: LinearMethod, seat: Seat) -> int:
    """Pass every ``nn.Linear`` (not its subclasses) to the linear method. Returns the bytes of all
    weights afterwards.

    A method that makes no copy keeps the tensor that it is given; if the tensor is also an
    embedding's, it counts once.
    """
    names = [name for name, module in causal_lm.named_modules() if type(module) is nn.Linear]
    before = sum(parameter.nbytes for parameter in causal_lm.parameters())
    num_bytes = 0
    for name in names:  # names, not modules, so that each weight is freed before the next is packed
        linear = causal_lm.get_submodule(name)
        packed = method.pack(linear.weight.data, None if linear.bias is None else linear.bias.data)
        _replace(causal_lm, name, PackedLinear(packed, linear.weight, seat))
        num_bytes += packed.num_bytes
    return (
        num_bytes + sum(parameter.nbytes for parameter in causal_lm.parameters())
        if method.copies
        else before
    )


def trial_ids(spec: ModelSpec) -> list[int]:
    """TRIAL_TOKENS token ids of the vocabulary."""
    return [(11 + 7919 * index) % spec.vocab_size for index in range(TRIAL_TOKENS)]


def _decoder_of(causal_lm: nn.Module) -> nn.Module:
    """The module whose output the head reads. In some classes the library's own answer is a part of
    it, without a config."""
    decoder = causal_lm.get_decoder()
    return decoder if hasattr(decoder, "config") else causal_lm.base_model


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def library_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function for the library's registry: query [1, H, T, D], key and value [1, Hkv,
    T, D] -> ([1, T, H, D], None)."""
    if torch.compiler.is_compiling():
        q, k, v = (heads[0].transpose(0, 1).contiguous() for heads in (query, key, value))
        return attend(q, k, v, module.layer_idx)[None], None
    seat: Seat | None = getattr(module, SEAT, None)
    if seat is None or not isinstance(seat.ctx, ForwardContext):
        raise Undrivable("its attention layers have no layer_idx")
    layer, ctx = module.layer_idx, seat.ctx
    seat.layers.append(layer)
    variant = seat.variants.get(layer)
    if variant is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        _check_call(attention_mask, causal, more)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scales = seat.cache_scales.get(layer, (1.0, 1.0))
        variant = AttentionVariant(scale, softcap, sliding_window, None, *scales)
        seat.variants[layer] = variant
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    if len(ctx.kv[layer]) != 2:
        raise Undrivable("the cache of its family is not one of keys and values")
    for new, cache in zip((k, v), ctx.kv[layer], strict=True):
        if new.shape[1:] != cache.shape[2:]:
            raise Undrivable(
                f"its keys or values are {list(new.shape[1:])} per token, but the config says"
                f" {list(cache.shape[2:])}"
            )
    return store_and_attend(q.contiguous(), k, v, ctx, layer, variant)[None], None


def _check_call(attention_mask: torch.Tensor | None, causal: bool, more: dict[str, Any]) -> None:
    """Raise Undrivable for an attention call that our attention would not compute correctly."""
    strange = sorted(
        name for name, value in more.items() if value is not None and name not in WITHOUT_EFFECT
    )
    if attention_mask is not None:
        strange.append("attention_mask")
    if not causal:
        strange.append("tokens that come later")
    if strange:
        raise Undrivable(f"its attention asks for {', '.join(strange)}")
