"""A model whose small steps run as compiled code: traced whole by torch.compile, with products and
attention left as they are.

Stands in the runner where the model stood, which stays as it is. ``executor.compiling`` has it
compile and tries out what came of that; it knows nothing of plans, of the cache on disk, or whether
compiling pays.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from setpoint.core.model import ModelSpec
from setpoint.engine.layers.context import ForwardContext
from setpoint.engine.layers.opaque import OpaqueWeight, Pass, TracedAttention, TracedOps, current

logger = logging.getLogger(__name__)


class CompiledModel:
    """What the runner runs instead of ``model``: steps of up to ``max_tokens`` tokens as compiled
    code, larger ones by the model itself.

    Nothing is ever compiled outside ``compiling``: a step that the compiled code does not fit ends
    its use.
    """

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self._run = torch.compile(
            lambda input_ids, ctx: model(input_ids, ctx),
            fullgraph=True,
            isolate_recompiles=True,
            options={"guard_filter_fn": _of_shapes},
        )
        self.model = model
        self.rotaries = model.rotaries
        self.logits = model.logits
        self.max_tokens = 0
        """Written by ``compiling`` and then by ``executor.compiling``."""
        self._compiling = False
        self._linears = [
            module for module in model.decoder.modules() if hasattr(module, "multiply")
        ]
        self._weights = [module.multiply for module in self._linears]
        for index, module in enumerate(self._linears):
            module.multiply = OpaqueWeight(module.multiply, index, module.out_features)
        self._variants = model.variants
        self._ops = TracedOps()
        self._attention = TracedAttention(spec.num_heads, spec.num_kv_heads)
        self._layers = tuple((layer, layer) for layer in range(spec.num_layers))

    def __call__(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        if not self.takes(len(input_ids)):
            return self.model(input_ids, ctx)
        if self._compiling:
            return self._call(input_ids, ctx)
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                return self._call(input_ids, ctx)
        except RuntimeError as error:
            if "recompile" not in str(error):
                raise
            self.max_tokens = 0
            logger.warning(
                "torch.compile is off from now on, because the compiled code could not run a"
                " step: %s",
                error,
            )
            return self.model(input_ids, ctx)

    def takes(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens runs compiled."""
        return num_tokens <= self.max_tokens

    @contextmanager
    def compiling(self, max_tokens: int) -> Iterator[None]:
        """Inside, a step of one token and one of ``max_tokens`` tokens each compile what all later
        ones use."""
        self.max_tokens, self._compiling = max_tokens, True
        try:
            yield
        finally:
            self._compiling = False

    def undo(self) -> None:
        """Leave the model as it was found."""
        for module, weight in zip(self._linears, self._weights, strict=True):
            module.multiply = weight

    def _call(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        if self._compiling and len(input_ids) > 1:
            for tensor in (input_ids, ctx.batch.positions):
                torch._dynamo.mark_dynamic(tensor, 0, min=2, max=self.max_tokens)
        traced = replace(ctx, ops=self._ops, attention=self._attention, kv=self._layers)
        with current(Pass(ctx, self._weights, self._variants)):
            return self._run(input_ids, traced)


def _of_shapes(guards: Sequence[Any]) -> list[bool]:
    """The conditions that are tested at every call: shapes of a step's tensors. Everything else is
    a constant of this model."""
    return [
        guard.guard_type == "SHAPE_ENV"
        or (guard.guard_type == "TENSOR_MATCH" and not isinstance(guard.value, nn.Parameter))
        for guard in guards
    ]
