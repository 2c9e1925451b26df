"""The MLP of gated layers."""

from __future__ import annotations

import torch

from setpoint.engine.kernels.ops import GateActivation
from setpoint.engine.layers.context import ForwardContext
from setpoint.engine.layers.linear import GatedLinear, Linear
from setpoint.engine.layers.module import Layer
from setpoint.engine.parallel.group import UNIT, spans


class GatedMLP(Layer):
    """x [T, C] -> [T, C]: down(activation(gate(x)) · up(x)). gated: the activation
    (``ConfigReader.gated``). names: of the matrices gate, up and down in the checkpoint."""

    is_mlp = True

    def __init__(
        self,
        hidden_size: int,
        size: int,
        gated: GateActivation,
        *,
        bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        gate, up, down = names
        self.gate_up_proj = GatedLinear(hidden_size, size, gated, bias=bias, names=(gate, up))
        setattr(self, down, Linear(size, hidden_size, bias=bias, divides_inputs=True))
        self._down = down
        self._size = size
        self.widths: tuple[int, ...] = ()
        """The number of inner values of each rank; written by ``split``."""

    @property
    def down(self) -> Linear:
        layer: Linear = self.__dict__[self._down]
        return layer

    def split(self, rank: int, size: int) -> None:
        """Note how the children are divided."""
        self.widths = tuple(end - begin for begin, end in spans(self._size, size, unit=UNIT))

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.down.join(self.share(x, ctx), ctx)

    def share(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """The outputs, or the partial sums, of this rank."""
        inner = self.activated(self.gate_up_proj(x, ctx), ctx)
        return self.down(self.down.inputs(inner, self.widths, ctx), ctx)

    def activated(self, products: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """The inner values from what ``gate_up_proj`` gives."""
        if self.gate_up_proj.activates:
            return products
        gated = self.gate_up_proj.gated
        inner: torch.Tensor = getattr(ctx.ops, gated.operation)(products, *gated.arguments)
        return inner
