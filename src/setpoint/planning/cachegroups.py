"""Puts a model's layers into cache groups: pure arithmetic on how far each layer sees."""

from __future__ import annotations

from collections import Counter, defaultdict

from setpoint.core.cachegroups import CacheGroup, CacheLayout
from setpoint.core.model import ModelSpec

PADDING = 1.05
"""Neither a short sequence nor one of the whole context takes more than this times the memory that
its layers need, for the sake of fewer groups."""


def cache_layout(spec: ModelSpec, context_len: int) -> CacheLayout:
    """The groups of a model that is served up to ``context_len`` tokens.

    A window that is not shorter than the context counts as none. A model of one kind of layers is
    one group.
    """
    kinds: dict[int | None, list[int]] = defaultdict(list)
    for layer in range(spec.num_layers):
        window = spec.windows[layer] if spec.windows else None
        kinds[window if window is not None and window < context_len else None].append(layer)
    counts = Counter({window: len(layers) for window, layers in kinds.items()})
    num_slabs = _num_slabs(counts, context_len)
    shape = (2, spec.num_kv_heads, spec.head_dim)
    order = sorted(kinds, key=lambda window: (window is not None, window or 0))
    return CacheLayout(
        tuple(
            CacheGroup(tuple(kinds[window][begin : begin + num_slabs]), window, shape)
            for window in order
            for begin in range(0, counts[window], num_slabs)
        ),
        num_slabs,
    )


def _num_slabs(counts: Counter[int | None], context_len: int) -> int:
    """Layers per group: the most that keep within PADDING."""

    def layer_tokens(num_tokens: int, num_slabs: int) -> int:
        return sum(
            -(-count // num_slabs) * num_slabs * min(num_tokens, window or num_tokens)
            for window, count in counts.items()
        )

    lengths = (1, context_len)
    return max(
        num_slabs
        for num_slabs in range(1, max(counts.values()) + 1)
        if all(
            layer_tokens(length, num_slabs) <= PADDING * layer_tokens(length, 1)
            for length in lengths
        )
    )
