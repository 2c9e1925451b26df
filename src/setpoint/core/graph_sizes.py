"""The sizes for which steps are captured as graphs, by SGLang's lists
(docs/sglang/options.md#graphs)."""

from __future__ import annotations

from dataclasses import dataclass

EXTEND_TOKENS = 512
"""Most tokens of a step other than decode that is captured. In a larger one the host's work is
hidden behind the device's."""


@dataclass(slots=True, frozen=True)
class GraphSizes:
    rows: tuple[int, ...]
    """Rows of the graphs of decode steps, ascending."""
    tokens: tuple[int, ...]
    """Tokens of the graphs of other steps, ascending."""


NO_GRAPHS = GraphSizes((), ())


def decode_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 12, then steps of 8 from 16, of 16 from 272, of 32 from 512, up to ``largest``,
    which is one of them."""
    sizes = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 497, 16), *range(512, largest + 1, 32))
    return up_to(largest, sizes)


def extend_sizes(largest: int) -> tuple[int, ...]:
    """Steps of 4 from 4, of 16 from 48, of 32 from 288, of 64 from 576, of 256 from 1280, of 512
    from 4608, up to ``largest``, which is one of them."""
    sizes = (
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, largest + 1, 512),
    )
    return up_to(largest, sizes)


def up_to(largest: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes below ``largest``, and ``largest`` itself; none if that is 0."""
    kept = tuple(size for size in sizes if size < largest)
    return (*kept, largest) if largest > 0 else ()
