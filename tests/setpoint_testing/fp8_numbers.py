"""Numbers on their way into a KV cache in 8 bits, and the codes that they become."""

from __future__ import annotations

import torch

from setpoint.engine.kernels.ops import Ops
from setpoint_testing.operation_cases import BF16

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = [E4M3, E5M2]
LARGEST = {E4M3: 0x7E, E5M2: 0x7B}
"""Codes of the largest values."""
HEADS = 8

SCALES = (0.013, 3.0, 2.0**-20, 1e30)
"""Scales of a cache: usual ones, and such that most numbers are the largest or zero."""


def quotients(values: torch.Tensor, scale: float) -> torch.Tensor:
    """values / scale, rounded once to fp32."""
    return (values.double() / float(torch.tensor(scale, dtype=torch.float32))).float()


def stored(ops: Ops, values: torch.Tensor, kind: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """What the values [n, dim] are in a cache, written as keys (at an angle of zero) and as values,
    each of one of a token's HEADS heads, with this scale. -> codes [n, dim]."""
    dim = values.shape[1]
    heads = values.view(-1, HEADS, dim)
    tokens = len(heads)
    caches = [torch.zeros(1, tokens, HEADS, dim, dtype=kind) for _ in range(2)]
    cos_sin = torch.cat((torch.ones(1, dim // 2), torch.zeros(1, dim // 2)), dim=-1)
    zeros = torch.zeros(tokens, dtype=torch.int64)
    ops.rope_and_store(
        *(heads.clone(), heads.clone(), heads, cos_sin, zeros, *caches, torch.arange(tokens)),
        *(scale, scale),
    )
    keys, same_values = (cache.view(torch.uint8).view(-1, dim) for cache in caches)
    halves = values.isfinite().view(-1, 2, dim // 2)  # 0 x infinity is NaN in a rotation
    usual = halves.all(dim=1, keepdim=True).expand_as(halves).reshape(-1, dim)
    assert torch.equal(keys[usual] & 0x7F, same_values[usual] & 0x7F)
    return same_values


def nearest(values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The codes by their definition: the finite value that is nearest, of two the even one, found
    among all values."""
    magnitudes = torch.arange(LARGEST[kind] + 1, dtype=torch.uint8).view(kind).double()
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    wanted = values.double().abs().contiguous()
    low, high = (torch.searchsorted(between, wanted, right=right) for right in (False, True))
    codes = torch.where(low % 2 == 0, low, high)
    codes = torch.where(wanted.isnan(), 0x7F, codes)
    return (codes | (values.signbit().long() << 7)).to(torch.uint8)


def hard_numbers() -> torch.Tensor:
    """All numbers of 16 bits, and numbers in fp32 around all borders between two codes."""
    all_bf16 = torch.arange(-(1 << 15), 1 << 15).short().view(BF16).float()
    codes = torch.arange(127, dtype=torch.uint8)
    borders = [
        (kind_values[1:] + kind_values[:-1]) / 2
        for kind_values in (codes.view(kind).float() for kind in KINDS)
    ]
    around = torch.cat(
        borders + [b * (1 + 2**-23) for b in borders] + [b * (1 - 2**-23) for b in borders]
    )
    numbers = torch.cat((all_bf16, around, -around))
    return torch.cat((numbers, torch.zeros(-len(numbers) % (HEADS * 96)))).view(-1, 96)
