"""The engines that each have the attention of their own requests and compute the experts together
(DP attention, decision 0069), as the layers and the runner of one of them see the others.

An engine's step is a step of all: each says how many tokens it has, and one that has none takes
part all the same, so that all make the same exchanges.
"""

from __future__ import annotations

from typing import Protocol

import torch

from setpoint.engine.parallel.group import ALONE, Group


class DataRanks(Protocol):
    """This process's place among them. T: the tokens of this rank in the present step; G: those of
    all ranks, in the order of the ranks."""

    size: int
    experts: Group
    """The ranks that divide the layers of experts. In these layers, they all have the same
    tokens."""

    def begin(self, num_tokens: int) -> None:
        """Begin this rank's next step, with so many tokens, and wait until all have begun theirs.
        Raises GroupLost if one of them begins no more."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether another rank has begun a step that this one has not."""
        ...

    def num_gathered(self, num_tokens: int) -> int:
        """G, in a step in which this rank has ``num_tokens``; while a step is recorded, the most
        there can be if no rank has more tokens than this one."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, C] of each rank -> [G, C], the same on all ranks."""
        ...

    def own(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The rows of this rank: x [G, C] -> [T, C]."""
        ...


class SameTokens:
    """Implements DataRanks for an engine whose ranks all have its tokens."""

    size = 1
    is_awaited = False

    def __init__(self, ranks: Group = ALONE) -> None:
        self.experts = ranks

    def begin(self, num_tokens: int) -> None:
        """There is nobody to wait for."""

    def num_gathered(self, num_tokens: int) -> int:
        return num_tokens

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def own(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return x
