"""Linear layers. A weight may be stacked from several checkpoint tensors (q, k, v; gate, up). A
LinearMethod decides how it is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from setpoint.engine.kernels.ops import GateActivation
from setpoint.engine.layers.context import Backends
from setpoint.engine.layers.module import Layer
from setpoint.engine.layers.token_embedding import Embedding
from setpoint.engine.parallel.group import UNIT, Span, spans
from setpoint.engine.quant.linear_method import (
    BlockMethod,
    GatedBlockMethod,
    GatedMethod,
    GgufWeight,
    LinearMethod,
    PackedWeight,
)


class Linear(Layer):
    """x [T, K] -> [T, N].

    ``out_features`` is N, or a dict of checkpoint name -> output rows when the weight is stacked
    from sibling tensors in that order, e.g. {"gate_proj": F, "up_proj": F}: "mlp.gate_proj.weight"
    is then the first F rows of "mlp.gate_up_proj.weight". divides_inputs: whether ranks that add
    partial sums (``Group.sums``) divide its inputs instead of its outputs.
    """

    mixes_blocks = True
    """Whether the parts of a stack may be kept in blocks of different kinds."""
    packed: PackedWeight
    """Written by ``finish_loading`` or ``keep_blocks``. Until then the layer holds the loaded
    parameters and cannot run."""

    def __init__(
        self,
        in_features: int,
        out_features: int | dict[str, int],
        *,
        bias: bool = False,
        divides_inputs: bool = False,
    ) -> None:
        super().__init__()
        self.divides_inputs = divides_inputs
        self.in_features = in_features
        self.input_spans: list[Span] = []
        """The inputs of each rank, if they are not divided evenly; written by the layer around
        it."""
        self.columns: Span | None = None
        """The inputs that this rank takes, if ranks divide them; written by ``split_inputs``."""
        self.parts = out_features if isinstance(out_features, dict) else {"": out_features}
        """Checkpoint name -> rows of the whole matrix; "" if it is not stacked."""
        self.spans: Mapping[str, list[Span]] = {}
        """The rows of each rank, for those of ``parts`` that ranks do not divide evenly."""
        size = self.out_features = sum(self.parts.values())
        self.held: list[Span] = [(0, rows) for rows in self.parts.values()]
        """For each of ``parts``, its rows that this rank holds; written by ``split``."""
        self.widths: tuple[int, ...] = ()
        """The number of outputs of each rank; written by ``split``."""
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(size, in_features), requires_grad=False
        )
        self.has_bias = bias
        self.bias: nn.Parameter | None = (
            nn.Parameter(torch.empty(size), requires_grad=False) if bias else None
        )
        self.is_elsewhere = False
        """Whether other ranks have the whole layer; written by ``leave_out`` and ``take``."""
        self._adds_bias = True
        """False if another rank adds it to the sum; written by ``split_inputs``."""
        self.blocks = ""
        """The kinds of the blocks that are kept, "" if none are; written by ``keep_blocks``."""

    def split(self, rank: int, size: int) -> None:
        """Keep only the outputs of one of ``size`` ranks. Must be called before weights are
        loaded."""
        assert self.weight is not None
        of_parts = [
            self.spans.get(name) or spans(rows, size, unit=UNIT)
            for name, rows in self.parts.items()
        ]
        self.held = [each[rank] for each in of_parts]
        self.widths = tuple(
            sum(each[other][1] - each[other][0] for each in of_parts) for other in range(size)
        )
        rows = self.widths[rank]
        self.weight = nn.Parameter(
            self.weight.new_empty(rows, self.weight.shape[1]), requires_grad=False
        )
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.new_empty(rows), requires_grad=False)

    def split_inputs(self, rank: int, size: int) -> None:
        """Take only the inputs of one of ``size`` ranks. Must be called before weights are
        loaded."""
        assert self.weight is not None
        of_ranks = self.input_spans or spans(self.in_features, size, unit=UNIT)
        begin, end = self.columns = of_ranks[rank]
        self.weight = nn.Parameter(
            self.weight.new_empty(self.out_features, end - begin), requires_grad=False
        )
        self._adds_bias = rank == 0

    def leave_out(self) -> None:
        """Hold nothing: other ranks have the whole layer."""
        self._resize(0)
        self.is_elsewhere = True
        if hasattr(self, "packed"):
            del self.packed

    def take(self) -> None:
        """Hold the whole layer again, which must be loaded next."""
        self._resize(self.out_features)
        self.is_elsewhere = False

    def _resize(self, rows: int) -> None:
        self.held = [(0, min(rows, of_part)) for of_part in self.parts.values()]
        self.weight = nn.Parameter(
            torch.empty(rows, self.in_features, device="meta"), requires_grad=False
        )
        if self.has_bias:
            self.bias = nn.Parameter(torch.empty(rows, device="meta"), requires_grad=False)

    def finish_loading(self, method: LinearMethod) -> int:
        """Pass the loaded weight to the method. Returns the bytes held afterwards."""
        assert self.weight is not None, "loaded twice"
        bias = None if self.bias is None or not self._adds_bias else self.bias.data
        return self._keep(self._pack(method, self.weight.data, bias))

    def keep_blocks(self, method: BlockMethod, stack: Sequence[GgufWeight]) -> int:
        """Like ``finish_loading``, but with blocks, one above the other, in place of the weight."""
        self.blocks = "+".join(blocks.kind for blocks in stack)
        return self._keep(method.pack_stack(stack, None if self.bias is None else self.bias.data))

    def _keep(self, packed: PackedWeight) -> int:
        self.packed = packed
        self.weight = self.bias = None
        return packed.num_bytes

    def _pack(
        self, method: LinearMethod, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> PackedWeight:
        return method.pack(weight, bias)

    def forward(self, x: torch.Tensor, backends: Backends) -> torch.Tensor:
        """The outputs that this rank holds."""
        return backends.multiply(self.packed, x)

    def of_shares(self, x: torch.Tensor, widths: Sequence[int], backends: Backends) -> torch.Tensor:
        """All outputs, of x [T, widths[rank]], which is this rank's share of the inputs."""
        return self.join(self(self.inputs(x, widths, backends), backends), backends)

    def inputs(self, x: torch.Tensor, widths: Sequence[int], backends: Backends) -> torch.Tensor:
        """The inputs that this rank multiplies, of x [T, widths[rank]], its share of them."""
        is_whole = self.columns is not None or not widths
        return x if is_whole else backends.group.gather(x, widths)

    def join(self, out: torch.Tensor, backends: Backends) -> torch.Tensor:
        """All outputs, of this rank's: a part of them, or partial sums."""
        if self.columns is not None:
            return backends.group.add(out)
        return backends.group.gather(out, self.widths) if self.widths else out


class Undivided(Linear):
    """A linear layer of which every rank has all: its outputs are needed on each of them."""

    def split(self, rank: int, size: int) -> None:
        """Keep all of it."""


class GatedLinear(Linear):
    """Gate and up of a gated MLP, stacked: x [T, K] -> [T, 2F] or, if ``activates``,
    activation(gate(x)) · up(x), [T, F].

    ``gated`` is the activation.
    """

    mixes_blocks = False  # a vector of gate and one of up are multiplied together
    activates: bool
    """True if the method also applies the activation; written by ``finish_loading`` or
    ``keep_blocks``."""

    def __init__(
        self,
        in_features: int,
        size: int,
        gated: GateActivation,
        *,
        bias: bool = False,
        names: tuple[str, str] = ("gate_proj", "up_proj"),
    ) -> None:
        super().__init__(in_features, dict.fromkeys(names, size), bias=bias)
        self.gated = gated

    def _pack(
        self, method: LinearMethod, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> PackedWeight:
        if isinstance(method, GatedMethod):
            self.activates = True
            return method.pack_gated(weight, bias, self.gated)
        self.activates = False
        return method.pack(weight, bias)

    def keep_blocks(self, method: BlockMethod, stack: Sequence[GgufWeight]) -> int:
        self.activates = isinstance(method, GatedBlockMethod)
        if not isinstance(method, GatedBlockMethod):
            return super().keep_blocks(method, stack)
        (blocks,) = stack
        self.blocks = blocks.kind
        return self._keep(
            method.pack_gated(blocks, None if self.bias is None else self.bias.data, self.gated)
        )


class TiedHead(Layer):
    """hidden [S, C] -> logits [S, V] with the embedding's weight; it has no checkpoint tensor of
    its own.

    Contract: it comes after its embedding in the model's tree, because weights are loaded in that
    order.
    """

    packed: PackedWeight

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.source = (embedding,)  # in a tuple, so that it is not registered as a child again

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of logits of each rank."""
        return self.source[0].widths

    def finish_loading(self, method: LinearMethod) -> int:
        embedding = self.source[0]
        if embedding.packed is not None:
            self.packed = embedding.packed
            return 0
        assert embedding.weight is not None
        self.packed = method.pack(embedding.weight.data, None)
        return self.packed.num_bytes if method.copies else 0

    def forward(self, x: torch.Tensor, backends: Backends) -> torch.Tensor:
        return backends.multiply(self.packed, x)


class NoHead(Layer):
    """Takes the place of the head in a model that serves hidden states only. It takes no memory,
    and the checkpoint may or may not have a head."""

    widths = ()

    def forward(self, x: torch.Tensor, backends: Backends) -> torch.Tensor:
        raise AssertionError("a model without a head has no logits")
