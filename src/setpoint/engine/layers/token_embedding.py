"""Token embedding."""

from __future__ import annotations

import torch
from torch import nn

from setpoint.engine.kernels.ops import Ops
from setpoint.engine.kernels.ref import scale_rows
from setpoint.engine.layers.module import Layer
from setpoint.engine.quant.linear_method import BlockMethod, Blocks, PackedRows


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
        self.blocks = ""
        """The kind of the blocks that are kept, "" if none are; written by ``keep_blocks``."""

    def keep_blocks(self, method: BlockMethod, blocks: Blocks) -> int:
        """Look ids up in ``blocks`` instead of a weight. Returns the bytes held afterwards."""
        self.packed, self.weight, self.blocks = method.pack(blocks, None), None, blocks.kind
        return self.packed.num_bytes

    def forward(self, ids: torch.Tensor, ops: Ops) -> torch.Tensor:
        if self.packed is None:
            return ops.embedding(ids, self.weight, self.scale)
        return scale_rows(self.packed.rows(ids), self.scale)
