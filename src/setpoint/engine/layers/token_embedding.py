"""Token embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from setpoint.engine.layers.context import Backends
from setpoint.engine.layers.module import Layer
from setpoint.engine.parallel.group import UNIT, Span, spans
from setpoint.engine.quant.linear_method import BlockMethod, GgufWeight, PackedRows


class Embedding(Layer):
    """ids [T] -> [T, C], multiplied by ``scale`` and rounded as in transformers (see
    ``Ops.embedding``)."""

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(vocab_size, hidden_size), requires_grad=False
        )
        self.packed: PackedRows | None = None
        """Replaces the weight when its blocks are kept; written by ``keep_blocks``."""
        self.num_rows = vocab_size
        self.held: list[Span] = [(0, vocab_size)]
        """The rows that this rank holds; written by ``split``."""
        self.widths: tuple[int, ...] = ()
        """The number of rows of each rank; written by ``split``."""
        self.blocks = ""
        """The kind of the blocks that are kept, "" if none are; written by ``keep_blocks``."""

    def split(self, rank: int, size: int) -> None:
        """Keep only the rows of one of ``size`` ranks. Must be called before weights are
        loaded."""
        assert self.weight is not None
        of_ranks = spans(len(self.weight), size, unit=UNIT)
        self.held = [of_ranks[rank]]
        self.widths = tuple(end - begin for begin, end in of_ranks)
        self.weight = nn.Parameter(
            self.weight.new_empty(self.widths[rank], self.weight.shape[1]), requires_grad=False
        )

    def keep_blocks(self, method: BlockMethod, stack: Sequence[GgufWeight]) -> int:
        """Look ids up in blocks instead of a weight. Returns the bytes held afterwards."""
        (blocks,) = stack
        self.packed, self.weight, self.blocks = method.pack(blocks, None), None, blocks.kind
        return self.packed.num_bytes

    def forward(self, ids: torch.Tensor, backends: Backends) -> torch.Tensor:
        group, (own,) = backends.group, self.held
        places = group.own_ids(ids, own)
        if self.packed is None:
            rows = backends.ops.embedding(places, self.weight, self.scale)
        else:
            rows = self.packed.rows(places, self.scale)
        return group.gather_rows(rows, ids, own)
