"""Runs small steps through torch.compile: the model's code is traced as a whole; products and
attention stay the engine's own.

``executor.compiling`` makes it compile and tests the result; this module does not know the cache on
disk, nor whether compiling is worthwhile. Intermediate results may be rounded less often than in
the eager way, so a row may differ in its last bits between a small and a large step.
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
from setpoint.engine.layers.context import Backends
from setpoint.engine.layers.experts import Grouped
from setpoint.engine.layers.opaque import (
    Pass,
    TracedAttention,
    TracedOps,
    TracedProducts,
    running,
)
from setpoint.engine.runner.batch import ForwardBatch
from setpoint.engine.runner.forward_pass import ForwardPass
from setpoint.engine.runner.way import Ran, Way

logger = logging.getLogger(__name__)


class CompiledWay:
    """Implements ``runner.way.Way`` for steps of up to ``max_tokens`` tokens.

    Nothing is ever compiled outside ``compiling``: if the compiled code does not fit a step, it is
    not used again, and ``otherwise`` runs the step.
    """

    name = "compiled"
    num_bytes = 0

    def __init__(
        self, forward_pass: ForwardPass, backends: Backends, spec: ModelSpec, otherwise: Way
    ) -> None:
        model = forward_pass.model
        self._pass = forward_pass
        self._backends = backends
        self._otherwise = otherwise
        self._run = torch.compile(
            lambda input_ids, ctx: model(input_ids, ctx),
            fullgraph=True,
            isolate_recompiles=True,
            options={"guard_filter_fn": _keep_shape_guards},
        )
        self.max_tokens = 0
        """Written by ``compiling``, then by ``executor.compiling``."""
        self._compiling = False
        self._variants = model.variants
        products = [
            (isinstance(module, Grouped), module.packed, module.out_features)
            for module in model.decoder.modules()
            if hasattr(module, "packed") and hasattr(module, "out_features")
        ]
        self._products, self._grouped = (
            TracedProducts(
                (packed, columns) for is_grouped, packed, columns in products if is_grouped == of
            )
            for of in (False, True)
        )
        self._ops = TracedOps()
        self._attention = TracedAttention(spec.num_heads, spec.num_kv_heads)
        self._layers = tuple((layer, layer) for layer in range(spec.num_layers))

    def takes(self, batch: ForwardBatch) -> bool:
        return batch.num_tokens <= self.max_tokens

    def run(self, batch: ForwardBatch, *, with_logits: bool) -> Ran:
        try:
            hidden = self._hidden(batch)
        except RuntimeError as error:
            if self._compiling or "recompile" not in str(error):
                raise
            self.max_tokens = 0
            logger.warning(
                "torch.compile is off from now on, because the compiled code could not run a"
                " step: %s",
                error,
            )
            return self._otherwise.run(batch, with_logits=with_logits)
        index = self._pass.sample_index(batch) if with_logits else None
        answer = None if index is None else self._pass.answer(hidden, index, self._backends)
        return Ran(self, hidden, answer)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._pass.logits(hidden, self._backends)

    @contextmanager
    def compiling(self, max_tokens: int) -> Iterator[None]:
        """Within the block, a step of one token and a step of ``max_tokens`` tokens compile the
        code that all later steps use."""
        self.max_tokens, self._compiling = max_tokens, True
        try:
            yield
        finally:
            self._compiling = False

    @torch.inference_mode()
    def _hidden(self, batch: ForwardBatch) -> torch.Tensor:
        input_ids, ctx = self._pass.begin(self._pass.inputs(batch), self._backends)
        if self._compiling and len(input_ids) > 1:
            for tensor in (input_ids, ctx.batches[0].positions):
                torch._dynamo.mark_dynamic(tensor, 0, min=2, max=self.max_tokens)
        traced = replace(
            ctx,
            ops=self._ops,
            attention=self._attention,
            multiply=self._products.multiply,
            multiply_grouped=self._grouped.multiply_grouped,
            kv=self._layers,
        )
        with running(Pass(ctx, self._products.weights, self._grouped.weights, self._variants)):
            if self._compiling:
                return self._run(input_ids, traced)
            with torch.compiler.set_stance("fail_on_recompile"):
                return self._run(input_ids, traced)


def _keep_shape_guards(guards: Sequence[Any]) -> list[bool]:
    """Whether to test each guard at every call: only those on the shapes of a step's tensors.
    Everything else is constant for this model."""
    return [
        guard.guard_type == "SHAPE_ENV"
        or (guard.guard_type == "TENSOR_MATCH" and not isinstance(guard.value, nn.Parameter))
        for guard in guards
    ]
