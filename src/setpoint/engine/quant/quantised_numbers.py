"""The numbers of a quantised matrix in plain torch: its values in bf16, and its blocks for the
kernels that multiply them as they are (kernels/cpu/blocks/folder_blocks.cpp).

A value is scale · (code - zero), rounded once to bf16. With a scale in 16 bits the product is exact
in fp32; one in fp32 is the only case in which fp32 rounds, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK_ROWS = 4096
BLOCK = 32
"""Inputs of a block."""
MIDDLE = 128
"""The middle code of 8 bits, and what makes a code of 8 bits a signed one."""


@dataclass(slots=True, frozen=True)
class Numbers:
    """The numbers of a matrix [N, K] with G = ceil(K / group) scales in a row."""

    codes: torch.Tensor
    """uint8 [N, K]: whole numbers without a sign, or codes of E4M3 or of ``table``."""
    scales: torch.Tensor
    """fp32 [N, G]."""
    group: int
    zeros: torch.Tensor | None = None
    """uint8 [N, G]; None: the codes are no whole numbers."""
    table: torch.Tensor | None = None
    """fp32: the values of the codes; None without ``zeros``: they are E4M3."""
    order: torch.Tensor | None = None
    """int64 [K]: the group of each input; None: groups are runs of neighbours."""


def values_of(numbers: Numbers) -> torch.Tensor:
    """The matrix [N, K] in bf16."""
    out = torch.empty(numbers.codes.shape, dtype=torch.bfloat16)
    for begin in range(0, len(out), CHUNK_ROWS):
        rows = slice(begin, begin + CHUNK_ROWS)
        codes = numbers.codes[rows]
        if numbers.table is not None:
            plain = numbers.table[codes.int()]
        elif numbers.zeros is None:
            plain = codes.view(torch.float8_e4m3fn).float()
        else:
            plain = codes.float() - _of_inputs(numbers, numbers.zeros[rows].float())
        out[rows] = plain * _of_inputs(numbers, numbers.scales[rows])
    return out


def _of_inputs(numbers: Numbers, of_groups: torch.Tensor) -> torch.Tensor:
    """[R, G] -> [R, K]."""
    if numbers.order is not None:
        return of_groups[:, numbers.order]
    return of_groups.repeat_interleave(numbers.group, 1)[:, : numbers.codes.shape[1]]


def block_kinds(numbers: Numbers, bits: int) -> tuple[str, ...]:
    """The kinds of blocks in which the matrix can be kept with all its values, the smallest first.
    bits: of its codes."""
    inputs = numbers.codes.shape[1]
    in_runs = numbers.group % BLOCK == 0 or numbers.group >= inputs
    if inputs % BLOCK or not in_runs or not (numbers.order is None and numbers.table is None):
        return ()
    if numbers.zeros is None:
        return ("FP8",)
    kinds = []
    if bool((numbers.scales.half().float() == numbers.scales).all()):
        if bool((numbers.zeros == 1 << (bits - 1)).all()):
            kinds.append("Q4_0" if bits == 4 else "Q8_0")
        if bits == 4:
            kinds.append("INT4Z")
    return (*kinds, "INT8Z")


def block_rows(numbers: Numbers, bits: int, kind: str) -> torch.Tensor:
    """The matrix in blocks of one of ``block_kinds``, uint8 [N, bytes of a row]."""
    rows, inputs = numbers.codes.shape
    blocks = inputs // BLOCK

    def of_blocks(of_groups: torch.Tensor) -> torch.Tensor:
        """[N, G] -> bytes [N, blocks, size]."""
        each = of_groups.repeat_interleave(min(numbers.group, inputs) // BLOCK, 1)[:, :blocks]
        return each.contiguous().view(torch.uint8).view(rows, blocks, -1)

    codes = numbers.codes.view(rows, blocks, BLOCK)
    scales = numbers.scales
    if kind in ("Q4_0", "INT4Z"):
        codes, scales = codes[..., :16] | codes[..., 16:] << 4, scales.half()
    elif kind != "FP8" and bits == 8:
        codes = codes ^ MIDDLE
    if kind == "Q8_0":
        scales = scales.half()
    parts = [of_blocks(scales), codes]
    if kind in ("INT4Z", "INT8Z"):
        assert numbers.zeros is not None
        zeros = numbers.zeros ^ MIDDLE if kind == "INT8Z" and bits == 8 else numbers.zeros
        parts.insert(1, of_blocks(zeros))
    return torch.cat(parts, dim=-1).flatten(1)


def w8a8_rows(numbers: Numbers, input_scale: float) -> torch.Tensor:
    """A matrix of codes of 8 bits around the middle one, with a scale for each row, as rows of
    W8A8 (``core.model.BLOCK_KINDS``). input_scale: that of the activations; 0: each row has its
    own."""
    ends = torch.full((len(numbers.codes), 2), input_scale)
    ends[:, 0] = numbers.scales[:, 0]
    return torch.cat((numbers.codes ^ MIDDLE, ends.view(torch.uint8).view(len(ends), -1)), dim=1)
