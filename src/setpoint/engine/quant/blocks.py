"""Linear layers on the blocks of a GGUF file or a quantised folder (kernels/cpu/blocks/blocks.cpp):
codes of 2 to 8 bits, converted to bf16 while they are multiplied. bf16 only.

The product is bit for bit that of ``quant.cpu_linear`` on the dequantised weight in bf16. With
``--quantization blocks_int8`` activations are rounded to 8 bits instead, and the products are those
of integers: of few rows with the codes as they are (kernels/cpu/blocks/rounded_blocks.cpp), of many
rows with codes that are rotated and rounded to 8 bits, too (rotated_blocks.cpp).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence, Set

import torch

from setpoint.core.model import BLOCK_KINDS, INT8_KINDS, W8A8
from setpoint.engine.kernels.cpu.calls import BlockRowsCall
from setpoint.engine.kernels.cpu.library import Kernels, load
from setpoint.engine.kernels.host_memory import in_huge_pages
from setpoint.engine.kernels.ops import GateActivation, KernelsUnavailable
from setpoint.engine.quant.cpu_linear import PANEL, PanelWeight, interleave
from setpoint.engine.quant.linear_method import GgufWeight, PackedWeight
from setpoint.engine.quant.w8a8_int8_cpu import Int8Weight, stored

KINDS = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "MXFP4": 39,
    "INT4Z": 104,
    "INT8Z": 108,
    "FP8": 109,
}
"""Kind of block -> its number in ggml, which the C++ code also uses (blocks.h, Kind)."""
BLOCK = 32
"""Number of values in a block of the C++ code. A block of a K-quant in a file is several of
them."""


class BlockWeight(PanelWeight):
    """Implements ``quant.linear_method.PackedRows``."""

    def __init__(
        self,
        blocks: GgufWeight,
        bias: torch.Tensor | None,
        kernels: Kernels,
        gate: GateActivation | None = None,
        *,
        rounded: bool = False,
    ) -> None:
        """rounded: whether it is multiplied by activations of 8 bits."""
        raw, kind = blocks.rows.contiguous(), KINDS[blocks.kind]
        gated = gate is not None
        if gated and bias is not None:
            bias = interleave(bias, kernels.vector_columns)
        rows, row_bytes = raw.shape
        columns, of_panel = (rows // 2, PANEL // 2) if gated else (rows, PANEL)
        stored = BLOCK_KINDS[blocks.kind]
        num_blocks = row_bytes // stored.num_bytes * stored.num_values // BLOCK
        panel_bytes = PANEL * stored.in_memory(row_bytes)
        panels = in_huge_pages((-(-columns // of_panel), panel_bytes), torch.uint8)
        pack = kernels.pack_rounded_blocks if rounded else kernels.pack_blocks
        pack(
            raw.data_ptr(),
            rows,
            num_blocks,
            panels.data_ptr(),
            kind,
            gated,
            torch.get_num_threads(),
        )
        super().__init__(
            panels,
            bias,
            kernels,
            columns=columns,
            k=num_blocks * BLOCK,
            dtype=torch.bfloat16,
            gate=gate,
            blocks=kind,
            rounded=rounded,
        )
        if rounded:
            self.product = "int8"
        self._read_rows = kernels.rounded_block_rows if rounded else kernels.block_rows
        self._rows_call = BlockRowsCall(weight=panels.data_ptr(), blocks=num_blocks, kind=kind)
        self._rows_address = ctypes.addressof(self._rows_call)

    def rows(self, ids: torch.Tensor, scale: float) -> torch.Tensor:
        assert ids.dtype == torch.int32
        assert ids.is_contiguous()
        out = torch.empty((len(ids), self.k), dtype=torch.bfloat16)
        call = self._rows_call
        call.ids = ids.data_ptr()
        call.out = out.data_ptr()
        call.rows = len(ids)
        call.scale = scale
        call.threads = torch.get_num_threads()
        self._read_rows(self._rows_address)
        return out


class BlockStack:
    """Matrices in blocks of different kinds, one above the other: each multiplies into its own
    columns of the output. Implements ``quant.linear_method.PackedWeight``."""

    def __init__(self, parts: Sequence[BlockWeight]) -> None:
        self._parts = parts
        self._columns = sum(part.columns for part in parts)
        self.num_bytes = sum(part.num_bytes for part in parts)
        for part in parts:
            part.call.out_row = self._columns
        if all(hasattr(part, "product") for part in parts):
            self.product = "int8"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(x), self._columns), dtype=torch.bfloat16)
        at = out.data_ptr()
        for part in self._parts:
            part.multiply(x, at)
            at += part.columns * out.itemsize
        return out


class BlockLinear:
    """Implements ``quant.linear_method.BlockMethod``."""

    kinds = KINDS.keys() | {W8A8}

    def __init__(self, kernels: Kernels, rounds: Set[str] = frozenset()) -> None:
        self._kernels = kernels
        self.rounds = rounds

    def pack(self, blocks: GgufWeight, bias: torch.Tensor | None) -> BlockWeight:
        assert blocks.kind != W8A8, "its rows cannot be looked up"
        return BlockWeight(blocks, bias, self._kernels, rounded=blocks.kind in self.rounds)

    def pack_stack(self, stack: Sequence[GgufWeight], bias: torch.Tensor | None) -> PackedWeight:
        if len(stack) == 1:
            return self._pack(stack[0], bias, None)
        heights = [len(blocks.rows) for blocks in stack]
        biases = [None] * len(stack) if bias is None else bias.split(heights)
        return BlockStack([self.pack(*each) for each in zip(stack, biases, strict=True)])

    def pack_gated(
        self, blocks: GgufWeight, bias: torch.Tensor | None, gate: GateActivation
    ) -> PackedWeight:
        return self._pack(blocks, bias, gate)

    def _pack(
        self, blocks: GgufWeight, bias: torch.Tensor | None, gate: GateActivation | None
    ) -> PackedWeight:
        if blocks.kind == W8A8:
            return Int8Weight(stored(blocks.rows), bias, self._kernels, gate)
        rounded = blocks.kind in self.rounds
        return BlockWeight(blocks, bias, self._kernels, gate, rounded=rounded)


def create(dtype: torch.dtype, *, level: str | None = None, rounded: bool = False) -> BlockLinear:
    """The method at the given instruction level (None: the best). rounded: multiply by activations
    of 8 bits where there is a product for the kind. Raises KernelsUnavailable with
    the reason if it cannot run."""
    if dtype != torch.bfloat16:
        raise KernelsUnavailable(f"blocks are multiplied in bfloat16, not {dtype}")
    return BlockLinear(load(level), INT8_KINDS if rounded else frozenset())
