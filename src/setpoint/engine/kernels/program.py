"""The seam of captured steps: a recorder watches one run of a model's forward, a program repeats it
with a single call.

A device that can do this has an entry in ``registry.RECORDERS``; the others run every step eagerly.
Knows nothing of models.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

KINDS = ("linear", "attention", "norm", "rope", "activation", "embedding", "head", "sampling")
"""The kinds of kernel that a program's time is split by."""


class NotCapturable(Exception):
    """Something in the forward cannot be recorded; the message says what, for the log."""


class Program(Protocol):
    num_bytes: int
    """Of the tensors that were made in the recording, which it keeps."""

    def run(self, *, tokens: int, sequences: int, samples: int) -> None:
        """Repeat what was recorded for a step of this size: each count at most what was recorded.

        It reads and writes the tensors of the recording, of each tensor as many leading rows as the
        step has.
        """
        ...

    def start_timing(self) -> None:
        """Measure the time of every kernel from now on."""
        ...

    def take_times(self) -> dict[str, float]:
        """Seconds per kind since the last look, over all runs."""
        ...


class Recorder(Protocol):
    peak_bytes: int
    """The most that tensors made in recordings took at the same moment."""

    def recording(
        self, rows: str = "tokens", *, products: str = "linear"
    ) -> AbstractContextManager[None]:
        """What is called inside is recorded and not executed: its tensors have no values.
        NotCapturable comes out of the block if something cannot be; then nothing of the block is
        recorded.

        ``rows``: which of the counts the rows of kernels are a multiple of; ``products``: the kind
        that linear layers count as.
        """
        ...

    def program(self, *, tokens: int, sequences: int, samples: int) -> Program:
        """Of all that was recorded, at these counts, in this order. The recorder is used up."""
        ...
