"""Matrices that a folder stores as codes and scales, read by their description
(``core.quantised``): as values in bf16, and as blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from setpoint.core.errors import CheckpointError
from setpoint.core.model import BLOCK_KINDS
from setpoint.core.quantised import Codes, NormalTable, QuantisedMatrix
from setpoint.engine.models.stored_tensors import Slices, StoredTensor, WholeTensor
from setpoint.engine.quant.quantised_numbers import (
    Numbers,
    block_kinds,
    block_rows,
    values_of,
    w8a8_rows,
)

AWQ_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device="cpu")
"""Where in a word AWQ has the code of each of eight neighbours."""
LARGEST_SCALE = 1e30
"""A value with a larger scale may be infinite."""
NOT_A_NUMBER = 0x7F
"""The code of E4M3 that is none; with a sign, too."""


@dataclass(slots=True, frozen=True)
class QuantisedTensor:
    """Implements StoredTensor: the matrix [N, K] in bf16."""

    matrix: QuantisedMatrix
    stored: Mapping[str, WholeTensor]

    @property
    def file(self) -> Path:
        return self.stored[self.matrix.codes.name].file

    @property
    def name(self) -> str:
        return self.matrix.codes.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    def read(self, slices: Slices = ()) -> torch.Tensor:
        found = values_of(self.numbers())
        return found[slices] if slices else found

    @property
    def bits(self) -> int:
        return self.matrix.codes.bits

    def kinds(self) -> tuple[str, ...]:
        """The kinds of blocks in which it can be kept, the best first; reads scales, zeros and
        order only."""
        if self.matrix.activations:
            return ("W8A8", *self._exact_kinds())
        return self._exact_kinds()

    def _exact_kinds(self) -> tuple[str, ...]:
        if self.matrix.normal:
            return ()
        codes = torch.empty(self.matrix.shape, dtype=torch.uint8, device="meta")
        return block_kinds(self._around(codes), self.bits)

    def why_no_blocks(self) -> str:
        """Why it is read as values, in words."""
        if self.matrix.normal:
            return "NF4 and FP4 have no blocks here"
        if self.matrix.order and self._order() is not None:
            return "their groups are not runs of neighbours (desc_act)"
        if not self.matrix.fits_blocks:
            return "their groups are not multiples of 32 inputs"
        return "their layer, or its division among ranks, needs values"

    def blocks(self, kind: str) -> QuantisedBlocks:
        return QuantisedBlocks(self, kind)

    def input_scale(self) -> float:
        """The scale of activations; 0: each row has its own."""
        activations = self.matrix.activations
        if activations is None or not activations.scale:
            return 0.0
        scale = float(self._floats(activations.scale).reshape(-1)[0])
        if scale <= 0:
            self._fail(activations.scale, f"is {scale:g}; a scale must be above zero")
        return scale

    def numbers(self) -> Numbers:
        codes = self.matrix.codes
        if self.matrix.normal:
            packed = self.stored[codes.name].read().flatten()
            each = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()
            outputs, inputs = self.matrix.shape
            return self._around(each[: outputs * inputs].view(outputs, inputs))
        if self.matrix.is_float:
            each = self.stored[codes.name].read().view(torch.uint8)
            if bool(((each & NOT_A_NUMBER) == NOT_A_NUMBER).any()):
                self._fail(codes.name, "has codes that are no numbers (NaN)")
            return self._around(each)
        return self._around(_unpacked(self.stored[codes.name], codes, *self.matrix.shape))

    def _around(self, codes: torch.Tensor) -> Numbers:
        """The numbers with these codes."""
        matrix = self.matrix
        outputs = matrix.shape[0]
        zeros, table = None, None
        if matrix.normal:
            table = self._floats(matrix.normal.table)
            scales = self._nested_scales(matrix.normal)
        else:
            scales = self._floats(matrix.scales)
            if not matrix.is_float:
                zeros = self._zeros()
        scales = scales.T if matrix.scales_inputs_first else scales
        scales = scales.reshape(matrix.num_scales) * matrix.factor
        return Numbers(
            codes,
            _of_outputs(scales, matrix.rows, outputs),
            matrix.group,
            None if zeros is None else _of_outputs(zeros, matrix.rows, outputs),
            table,
            self._order(),
        )

    def _zeros(self) -> torch.Tensor:
        """uint8, of as many as there are scales."""
        outputs, groups = self.matrix.num_scales
        zeros = self.matrix.zeros
        if zeros is None:
            return torch.full((outputs, groups), 1 << (self.bits - 1), dtype=torch.uint8)
        return _unpacked(self.stored[zeros.name], zeros, outputs, groups)

    def _order(self) -> torch.Tensor | None:
        """The group of each input; None: groups are runs of neighbours."""
        matrix = self.matrix
        if not matrix.order:
            return None
        order, groups = self.stored[matrix.order].read().long(), matrix.num_scales[1]
        if bool(((order < 0) | (order >= groups)).any()):
            self._fail(
                matrix.order,
                f"names groups from {int(order.min())} to {int(order.max())}; there are {groups}",
            )
        in_runs = torch.arange(len(order)) // matrix.group
        return None if torch.equal(order, in_runs) else order

    def _floats(self, name: str) -> torch.Tensor:
        found = self.stored[name].read().float()
        if not bool((found.abs() < LARGEST_SCALE).all()):
            self._fail(name, "has a number that is not finite or too large")
        return found

    def _nested_scales(self, normal: NormalTable) -> torch.Tensor:
        if not normal.nested_table:
            return self._floats(self.matrix.scales)
        table, scales = self._floats(normal.nested_table), self._floats(normal.nested_scales)
        found = table[self.stored[self.matrix.scales].read().int()]
        each = scales.repeat_interleave(normal.nested_block)[: len(found)]
        return found * each + normal.nested_offset

    def _fail(self, name: str, problem: str) -> NoReturn:
        raise CheckpointError(f"Tensor {name!r} in {self.stored[name].file} {problem}.")


@dataclass(slots=True, frozen=True)
class QuantisedBlocks:
    """Implements StoredTensor: the matrix in blocks of a kind, uint8 [N, bytes of a row]."""

    tensor: QuantisedTensor
    kind: str

    @property
    def file(self) -> Path:
        return self.tensor.file

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, inputs = self.tensor.shape
        return outputs, BLOCK_KINDS[self.kind].row_bytes(inputs)

    def read(self, slices: Slices = ()) -> torch.Tensor:
        numbers = self.tensor.numbers()
        if self.kind == "W8A8":
            found = w8a8_rows(numbers, self.tensor.input_scale())
        else:
            found = block_rows(numbers, self.tensor.bits, self.kind)
        return found[slices] if slices else found


def with_matrices(
    stored: Mapping[str, WholeTensor], matrices: Iterable[QuantisedMatrix], folder: Path
) -> dict[str, StoredTensor]:
    """The stored tensors with these matrices in place of what they are made of."""
    found: dict[str, StoredTensor] = dict(stored)
    for matrix in matrices:
        for name in matrix.tensors:
            if name not in stored:
                raise CheckpointError(f"Tensor {name!r} is missing in {folder}.")
            found.pop(name, None)
    for matrix in matrices:
        found[matrix.name] = QuantisedTensor(matrix, stored)
    return found


def _of_outputs(numbers: torch.Tensor, rows: int, outputs: int) -> torch.Tensor:
    """[ceil(N / rows), G] -> [N, G]."""
    return numbers if rows == 1 else numbers.repeat_interleave(rows, 0)[:outputs]


def _unpacked(tensor: WholeTensor, codes: Codes, outputs: int, inputs: int) -> torch.Tensor:
    """The codes without a sign, uint8 [outputs, inputs]."""
    found = tensor.read()
    if codes.word_axis == 0:
        found = found.T
    if codes.word_axis is not None:
        found = found.contiguous().view(torch.uint8)
        if codes.bits == 4:
            found = torch.stack((found & 15, found >> 4), dim=-1).flatten(1)
        if codes.interleaved:
            found = found.view(len(found), -1, codes.per_word)[..., AWQ_PLACES].flatten(1)
    else:
        found = found.view(torch.uint8)
    if codes.inputs_first != (codes.word_axis == 0):
        found = found.T
    found = found[:outputs, :inputs]
    if codes.offset:
        found = found + codes.offset & (1 << codes.bits) - 1
    return found.contiguous()
