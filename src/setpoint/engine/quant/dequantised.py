"""The values of a GGUF's blocks in plain torch, for everything that does not multiply them as they
are.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A scale has at most 11
significant bits, a factor 8 and a code 8, so that every product is exact in fp32, and a value is
rounded at most once before it is rounded to bf16. So are the C++ code's (blocks.h).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from setpoint.core.model import BLOCK_KINDS
from setpoint.engine.quant.linear_method import GgufWeight

CHUNK_ROWS = 4096


def dequantised(blocks: GgufWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The weight [N, K] in this dtype."""
    kind = BLOCK_KINDS[blocks.kind]
    rows, row_bytes = blocks.rows.shape
    k = row_bytes // kind.num_bytes * kind.num_values
    out = torch.empty((rows, k), dtype=dtype, device=blocks.rows.device)
    for begin in range(0, rows, CHUNK_ROWS):
        raw = blocks.rows[begin : begin + CHUNK_ROWS].reshape(-1, kind.num_bytes)
        out[begin : begin + CHUNK_ROWS] = VALUES[blocks.kind](raw).view(-1, k)
    return out


def _scale(raw: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 number at this byte of each block, [blocks, 1] in fp32."""
    return raw[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: torch.Tensor) -> torch.Tensor:
    """[…, n] bytes -> […, 2n] codes: the lower four bits of all, then the upper ones."""
    return torch.cat((raw & 15, raw >> 4), dim=-1)


def _q4_0(raw: torch.Tensor) -> torch.Tensor:
    return _scale(raw, 0) * (_nibbles(raw[:, 2:]).float() - 8)


def _q4_1(raw: torch.Tensor) -> torch.Tensor:
    return _scale(raw, 0) * _nibbles(raw[:, 4:]).float() + _scale(raw, 2)


def _q8_0(raw: torch.Tensor) -> torch.Tensor:
    return _scale(raw, 0) * raw[:, 2:].view(torch.int8).float()


def _bits(raw: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """[…, n] bytes -> […, count, n]: the lowest ``width`` bits of all, then the next ones."""
    shifts = torch.arange(0, width * count, width, dtype=torch.uint8, device=raw.device)
    return raw.unsqueeze(-2) >> shifts.view(count, 1) & ((1 << width) - 1)


def _fifth_bits(raw: torch.Tensor, at: int) -> torch.Tensor:
    """Bit k of the four bytes at this place as 16 times bit 0, for k from 0 to 31."""
    return _bits(raw[:, at : at + 4], 1, 8).transpose(1, 2).reshape(-1, 32) << 4


def _q5_0(raw: torch.Tensor) -> torch.Tensor:
    return _scale(raw, 0) * ((_nibbles(raw[:, 6:]) | _fifth_bits(raw, 2)).float() - 16)


def _q5_1(raw: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(raw[:, 8:]) | _fifth_bits(raw, 4)
    return _scale(raw, 0) * codes.float() + _scale(raw, 2)


def _q2_k(raw: torch.Tensor) -> torch.Tensor:
    # A factor and a minimum for every 16 values, then two halves of 128 codes.
    codes = _bits(raw[:, 16:80].view(-1, 2, 32), 2, 4).view(-1, 16, 16).float()
    scales = _scale(raw, 80) * (raw[:, :16] & 15).float()
    offsets = _scale(raw, 82) * (raw[:, :16] >> 4).float()
    return scales.unsqueeze(2) * codes - offsets.unsqueeze(2)


def _q3_k(raw: torch.Tensor) -> torch.Tensor:
    # The third bits of all codes, their lower two bits as in Q2_K, and a factor for every 16
    # values: the lower four bits of all 16, then the upper two.
    high = _bits(raw[:, :32], 1, 8).view(-1, 16, 16)
    codes = _bits(raw[:, 32:96].view(-1, 2, 32), 2, 4).view(-1, 16, 16) | high << 2
    upper = _bits(raw[:, 104:108], 2, 4).view(-1, 16)
    factors = (_nibbles(raw[:, 96:104]) | upper << 4).float() - 32
    return (_scale(raw, 108) * factors).unsqueeze(2) * (codes.float() - 4)


def _with_minimums(raw: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    # Of the eight pairs of a factor and a minimum, with 6 bits each, the first four lie in the
    # lower bits of bytes 0-3 and 4-7; their upper bits and bytes 8-11 are the other four.
    low, mid, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    factors = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1)
    minimums = torch.cat((mid & 63, (high >> 4) | (mid >> 6 << 4)), dim=1)
    scales, offsets = _scale(raw, 0) * factors.float(), _scale(raw, 2) * minimums.float()
    return scales.unsqueeze(2) * codes.float() - offsets.unsqueeze(2)


def _q4_k(raw: torch.Tensor) -> torch.Tensor:
    return _with_minimums(raw, _nibbles(raw[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(raw: torch.Tensor) -> torch.Tensor:
    low = _nibbles(raw[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    return _with_minimums(raw, low | _bits(raw[:, 16:48], 1, 8) << 4)


def _q6_k(raw: torch.Tensor) -> torch.Tensor:
    # Each half of a block has 128 values: 64 bytes of lower bits, and 32 with upper bits of four.
    low, high = raw[:, :128].view(-1, 2, 64), raw[:, 128:192].view(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=raw.device).view(4, 1)
    codes = _nibbles(low).view(-1, 2, 4, 32) | ((high >> shifts & 3) << 4)
    factors = raw[:, 192:208].view(torch.int8).float().view(-1, 16, 1)
    scales = _scale(raw, 208).unsqueeze(2) * factors
    return scales * (codes.view(-1, 16, 16).float() - 32)


TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cpu")
"""The values of the codes of MXFP4 (OCP Microscaling Formats 1.0, E2M1); ggml has no negative
zero."""
BIAS = 127
"""A scale s of MXFP4 means 2^(s - BIAS)."""


def _mxfp4(raw: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(TABLE[_nibbles(raw[:, 1:]).int()], raw[:, :1].int() - BIAS)


TABLE_IQ4 = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    dtype=torch.float32,
    device="cpu",
)
"""The values of the codes of IQ4_NL and IQ4_XS (ggml-common.h, kvalues_iq4nl)."""


def _iq4_nl(raw: torch.Tensor) -> torch.Tensor:
    return _scale(raw, 0) * TABLE_IQ4[_nibbles(raw[:, 2:]).int()]


def _iq4_xs(raw: torch.Tensor) -> torch.Tensor:
    # A factor of 6 bits for each of eight blocks: upper two bits of all, then the lower four.
    upper = _bits(raw[:, 2:4], 2, 4).transpose(1, 2).reshape(-1, 8)
    lower = _bits(raw[:, 4:8], 4, 2).transpose(1, 2).reshape(-1, 8)
    scales = _scale(raw, 0) * ((lower | upper << 4).float() - 32)
    return scales.unsqueeze(2) * TABLE_IQ4[_nibbles(raw[:, 8:].view(-1, 8, 16)).int()]


VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""Kind -> its blocks [n, bytes] as fp32 values, n times as many as a block has."""
