"""The interface of captured steps: a recorder watches one run of a model's forward pass, and a
program repeats it with a single call.

A device that can do this has an entry in ``registry.RECORDERS``; the others run every step eagerly.
Knows nothing of models.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

KINDS = ("linear", "attention", "norm", "rope", "activation", "embedding", "head", "sampling")
"""The kinds of kernel by which a program's time is divided."""


class NotCapturable(Exception):
    """Something in the forward pass cannot be recorded; the message, for the log, says what."""


class Program(Protocol):
    num_bytes: int
    """Bytes of the recording's tensors, which the program keeps."""

    def run(self, *, tokens: int, sequences: int, samples: int) -> None:
        """Repeat the recording for a step of this size; no count may exceed that of the recording.

        It reads and writes the tensors of the recording: of each tensor as many leading rows as the
        step has.
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
    """The most bytes that tensors made in recordings took at once."""

    def recording(
        self, rows: str = "tokens", *, products: str = "linear"
    ) -> AbstractContextManager[None]:
        """Calls inside this context are recorded and not executed: their tensors have no values. If
        something cannot be recorded, the context raises NotCapturable, and nothing of it is
        recorded.

        ``rows``: which of the counts the rows of kernels are a multiple of; ``products``: the kind
        that linear layers count as.
        """
        ...

    def program(self, *, tokens: int, sequences: int, samples: int) -> Program:
        """A program of everything recorded so far, in order, recorded at these counts. The recorder
        cannot be used again."""
        ...
