"""The workloads of the benchmarks over HTTP: prompts of random token ids, the same for every
contender.

Prompts are a function of (workload, repetition). They are new in every repetition, so that no
prefix cache helps from one to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

VOCAB = (100, 49_000)
"""Ids drawn from this range: no special tokens of the default model."""


@dataclass(slots=True, frozen=True)
class Workload:
    name: str
    what: str
    num_requests: int
    shared_tokens: int
    own_tokens: int
    output_tokens: int
    num_groups: int = 1
    """Number of groups of requests that share a prefix. All groups have the same size, and their
    requests arrive mixed at random."""

    def prompts(self, repetition: int) -> list[list[int]]:
        """One prompt per request. Repetition -1 is for warming up."""
        rng = np.random.default_rng([ord(letter) for letter in self.name] + [repetition + 1])
        shared = [rng.integers(*VOCAB, self.shared_tokens).tolist() for _ in range(self.num_groups)]
        prompts = [
            shared[index % self.num_groups] + rng.integers(*VOCAB, self.own_tokens).tolist()
            for index in range(self.num_requests)
        ]
        return (
            prompts
            if self.num_groups == 1
            else [prompts[index] for index in rng.permutation(self.num_requests)]
        )

    @property
    def input_tokens(self) -> int:
        """The number of tokens of all prompts together."""
        return self.num_requests * (self.shared_tokens + self.own_tokens)

    @property
    def num_outputs(self) -> int:
        return self.num_requests * self.output_tokens


FULL: Sequence[Workload] = (
    Workload("W1", "one stream, 128 in, 128 out", 1, 0, 128, 128),
    Workload("W2", "64 × (128 in, 128 out)", 64, 0, 128, 128),
    Workload("W3", "64 × (1,024 shared + 32 own in, 32 out)", 64, 1024, 32, 32),
    Workload("W4", "16 × (512 in, 1 out)", 16, 0, 512, 1),
)
QUICK: Sequence[Workload] = (
    Workload("W1", "one stream, 16 in, 8 out", 1, 0, 16, 8),
    Workload("W2", "8 × (16 in, 8 out)", 8, 0, 16, 8),
    Workload("W3", "8 × (64 shared + 8 own in, 4 out)", 8, 64, 8, 4),
    Workload("W4", "2 × (64 in, 1 out)", 2, 0, 64, 1),
)

GROUPS = Workload("P1", "64 × (256 shared by 8 + 16 own in, 16 out)", 64, 256, 16, 16, num_groups=8)
QUICK_GROUPS = Workload("P1", "8 × (32 shared by 2 + 8 own in, 4 out)", 8, 32, 8, 4, num_groups=4)
