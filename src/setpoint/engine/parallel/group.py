"""The ranks that compute one model together, as its layers see them (decision 0062).

On CPUs each output of a matrix is computed whole by one rank, and the ranks gather the outputs, so
that every sum has the order that it has on one rank: the bits are the same. On GPUs the ranks
divide the inputs of every second matrix and add their partial sums (``Group.sums``), which
exchanges less. Every rank must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch

Span = tuple[int, int]
"""A range [begin, end)."""

UNIT = 32
"""Outputs of a matrix that stay together when it is divided: the C++ kernels compute as many at
once."""


class GroupLost(BaseException):
    """An exchange with the other ranks has failed, for the reason in the message. They cannot be
    brought into step again, so it ends the process; no handler of a request's error may catch
    it."""


class Group(Protocol):
    """This process's place among the ranks. T: tokens of the step; the same on all ranks."""

    rank: int
    size: int
    sums: bool
    """Whether ranks add partial sums where layers allow it (``Linear.divides_inputs``). Otherwise
    they divide matrices by outputs only."""
    before_logits: Callable[[torch.Tensor], None]
    """Must be called with hidden states before logits are computed that are not part of a captured
    or eager step, so that the other ranks compute them, too."""

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [T, widths[rank]] of each rank -> [T, sum of widths], the same on all ranks."""
        ...

    def gather_logits(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Like ``gather``, for rank 0 alone; the result of another rank is only its own part."""
        ...

    def numbers(self, own: int, device: torch.device) -> list[int]:
        """A number of each rank, exchanged on their devices, which the host waits for."""
        ...

    def own_ids(self, ids: torch.Tensor, own: Span) -> torch.Tensor:
        """ids [T] int32 -> their places in ``own``; 0 for those that are not in it."""
        ...

    def gather_rows(self, x: torch.Tensor, ids: torch.Tensor, own: Span) -> torch.Tensor:
        """x [T, C] of each rank -> [T, C]: row i is that of the rank whose ``own`` has ids[i]."""
        ...

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, N] of each rank -> their sum, the same on all ranks. Only if ``sums``."""
        ...


class Alone:
    """Implements Group for a model in one process."""

    rank = 0
    size = 1
    sums = False

    def before_logits(self, hidden: torch.Tensor) -> None:
        """There is nobody to tell."""

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return x

    def gather_logits(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return x

    def numbers(self, own: int, device: torch.device) -> list[int]:
        return [own]

    def own_ids(self, ids: torch.Tensor, own: Span) -> torch.Tensor:
        return ids

    def gather_rows(self, x: torch.Tensor, ids: torch.Tensor, own: Span) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x


ALONE = Alone()


def spans(length: int, size: int, *, unit: int = 1) -> list[Span]:
    """The spans of ``size`` ranks in [0, length), which is divided as evenly as whole units allow.
    The last rank gets the larger share: the first one samples, too. Units that are too large to
    give every rank one become smaller."""
    if length < unit * size:
        unit = 1
    count = -(-length // unit)
    ends = [min(length, count * rank // size * unit) for rank in range(size + 1)]
    return list(pairwise(ends))


def head_spans(num_heads: int, num_kv_heads: int, size: int) -> list[tuple[Span, Span]]:
    """The heads of q and those of K and V of each of ``size`` ranks.

    Up to one K and V head per rank, these are divided, and each takes its heads of q along. With
    more ranks, several of them have the same K and V head and divide its heads of q. size: one of
    ``ModelSpec.rank_counts``.
    """
    share = num_heads // num_kv_heads
    if size <= num_kv_heads:
        of_ranks = spans(num_kv_heads, size)
        return [((begin * share, end * share), (begin, end)) for begin, end in of_ranks]
    return [
        ((head * share + begin, head * share + end), (head, head + 1))
        for head in range(num_kv_heads)
        for begin, end in spans(share, size // num_kv_heads)
    ]
