"""The interface of captured steps: a recorder records the kernel calls of one forward pass, and a
program repeats them with a single call.

A device that can do this has an entry in ``kernel_registry.RECORDERS``; the others run every step
eagerly. Knows nothing of models.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

KINDS = (
    "linear",
    "attention",
    "norm",
    "rope",
    "activation",
    "embedding",
    "head",
    "sampling",
    "exchange",
)
"""The kinds of kernels among which a program's time is divided. exchange: with the other ranks of a
model."""


class NotCapturable(Exception):
    """Something in the forward pass cannot be recorded; the message says what, for the log."""


class Program(Protocol):
    num_bytes: int
    """Bytes of the recording's tensors, which the program keeps."""

    def run(self, *, tokens: int, sequences: int, samples: int, gathered: int) -> None:
        """Repeat the recording for a step of this size; no count may exceed that of the recording.
        gathered: the tokens of all data-parallel ranks together.

        The step's data are in the leading rows of the recording's tensors.
        """
        ...

    def start_timing(self) -> None:
        """Measure the time of every kernel from now on."""
        ...

    def take_times(self) -> dict[str, float]:
        """Seconds per kind since the last call, over all runs."""
        ...


class Recorder(Protocol):
    peak_bytes: int
    """Most bytes that the recordings' tensors took at the same time."""

    def recording(
        self, rows: str = "tokens", *, products: str = "linear"
    ) -> AbstractContextManager[None]:
        """Record the calls within the block instead of executing them; their tensors have no
        values. If something cannot be recorded, the block raises NotCapturable and leaves no
        trace.

        rows: the count of which the kernels' rows are a multiple. products: the kind under which
        linear layers are counted.
        """
        ...

    def program(self, *, tokens: int, sequences: int, samples: int, gathered: int) -> Program:
        """A program of everything recorded so far, in order. The counts are those of the recorded
        step. The recorder cannot be used again."""
        ...
