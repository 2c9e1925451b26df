"""Mixtures of experts: an MLP per expert, of which each token uses a few.

The experts are layers of their own, with the checkpoint's names, and so are loaded, quantised and
divided among ranks like every other matrix. Their products are grouped: one operation multiplies
all tokens by the experts that they have chosen (``engine.quant.grouped``).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from setpoint.core.model import Mixture
from setpoint.engine.kernels.ops import GateActivation, Routing
from setpoint.engine.layers.context import ForwardContext
from setpoint.engine.layers.expert_slots import ExpertSlots
from setpoint.engine.layers.linear import Linear, Undivided
from setpoint.engine.layers.mlp import GatedMLP
from setpoint.engine.layers.module import Layer
from setpoint.engine.quant.grouped import GroupedWeight, group
from setpoint.engine.quant.linear_method import LinearMethod


class Router(Undivided):
    """x [T, C] -> a score of each expert, [T, E]. It is small and decides, so it is never
    quantised. corrected: whether it has ``Ops.route``'s correction."""

    is_exact = True
    wide = ("e_score_correction_bias",)

    def __init__(
        self, hidden_size: int, num_experts: int, *, bias: bool = False, corrected: bool = False
    ) -> None:
        super().__init__(hidden_size, num_experts, bias=bias)
        self.e_score_correction_bias = (
            nn.Parameter(torch.empty(num_experts), requires_grad=False) if corrected else None
        )


class Grouped(Layer):
    """The matrices of one kind of the experts in this rank's slots, together. Contract: it comes
    after them in the model's tree, because weights are loaded in that order."""

    packed: GroupedWeight

    def __init__(self, layers: list[Linear]) -> None:
        super().__init__()
        self.hold(layers, 0)

    def hold(self, layers: list[Linear], first: int) -> None:
        """Hold these matrices, in the slots from ``first`` on."""
        self.source = tuple(layers)  # in a tuple, so that they are not registered as children again
        self.first = first

    def refresh(self) -> None:
        """Multiply by the matrices that are held now, also in steps that have been captured."""
        self.packed.replace([layer.packed for layer in self.source])

    @property
    def activates(self) -> bool:
        """Whether the product applies the activation (``GatedLinear.activates``); False for
        matrices other than gate and up."""
        return getattr(self.source[0], "activates", False)

    @property
    def out_features(self) -> int:
        """Columns of a product on this rank."""
        held = sum(end - begin for begin, end in self.source[0].held)
        return held // 2 if self.activates else held

    def finish_loading(self, method: LinearMethod) -> int:
        self.packed = group([layer.packed for layer in self.source], self.first)
        return 0

    def forward(self, x: torch.Tensor, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return ctx.multiply_grouped(self.packed, x, ids)


class SparseMLP(Layer):
    """x [T, C] -> [T, C]: the sum of weight · expert(x) over the experts that the router chooses
    for each token, and the shared expert, which every token uses, if there is one. Ranks that
    have tokens of their own (``Backends.data``) compute those of all together."""

    def __init__(
        self,
        hidden_size: int,
        mixture: Mixture,
        gated: GateActivation,
        routing: Routing,
        *,
        router: str = "gate",
        shared: str = "shared_expert",
        bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        """router, shared: names of the router and of the shared expert in the checkpoint. bias:
        whether the router and the experts have biases. names: of the matrices gate, up and down of
        an expert in the checkpoint."""
        super().__init__()
        corrected = mixture.is_corrected
        setattr(
            self, router, Router(hidden_size, mixture.num_experts, bias=bias, corrected=corrected)
        )
        self.experts = nn.ModuleList(
            GatedMLP(hidden_size, mixture.size, gated, bias=bias, names=names)
            for _ in range(mixture.num_experts)
        )
        self.gate_up = Grouped([expert.gate_up_proj for expert in self.experts])
        self.down = Grouped([expert.down for expert in self.experts])
        self.expert_slots = ExpertSlots(
            self.experts, {"gate_up_proj": self.gate_up, "down": self.down}
        )
        if mixture.shared_size:
            setattr(self, shared, GatedMLP(hidden_size, mixture.shared_size, gated))
        self.shared_expert_gate = Router(hidden_size, 1) if mixture.shared_is_gated else None
        self._router, self._shared = router, shared
        self._routing = routing

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        ctx, num_tokens = replace(ctx, group=ctx.data.experts), len(x)
        x = ctx.data.gather(x)
        is_whole = self.expert_slots.own is not None
        expert: GatedMLP = self.experts[self.expert_slots.one]
        router: Router = self.__dict__[self._router]
        correction = router.e_score_correction_bias
        ids, weights = ctx.ops.route(router(x, ctx), self._routing, correction)
        slots = self.expert_slots.of(ids, ctx)
        inner = expert.activated(self.gate_up(x, slots, ctx), ctx)
        parts = self.down(expert.down.inputs(inner, expert.widths, ctx), slots, ctx)
        parts = self.expert_slots.gather(parts, slots, ctx)
        gate = self.shared_expert_gate and self.shared_expert_gate(x, ctx)
        common = self.__dict__.get(self._shared)
        shared = common and (common(x, ctx) if is_whole else common.share(x, ctx))
        out = expert.down.join(ctx.ops.combine(parts, weights, shared, gate), ctx)
        return ctx.data.own(out, num_tokens)
