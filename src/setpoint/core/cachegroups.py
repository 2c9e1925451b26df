"""Divides a model's KV cache: layers that see equally far back form groups, and pages of one size
serve all groups (docs/decisions/0030-cache-groups.md). Pure arithmetic.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from setpoint.core.model import CachePart, ModelSpec, numbers_per_token
from setpoint.core.pagerows import PageRow, WindowColumns

PADDING = 1.08
"""Largest ratio of the memory that a sequence takes to the memory that its layers need, for one
token and for the whole context. Accepting some waste makes fewer groups possible."""


@dataclass(slots=True, frozen=True)
class CacheGroup:
    """Layers that keep the same positions of a sequence."""

    layers: tuple[int, ...]
    window: int | None
    """Number of positions that a token sees, including its own; None: all positions up to its
    own."""


@dataclass(slots=True, frozen=True)
class CacheLayout:
    """A model's groups, in the order of a page row's columns, and the number of slabs that they
    share."""

    groups: tuple[CacheGroup, ...]
    num_slabs: int
    """Number of layers that a page has room for. The j-th layer of a group uses slab j."""
    parts: tuple[CachePart, ...]
    """What a layer keeps for each token."""

    def page_bytes(self, page_size: int, element_bytes: int) -> int:
        """Bytes of one page, whichever group it serves."""
        return numbers_per_token(self.parts) * self.num_slabs * page_size * element_bytes

    @property
    def page_row(self) -> PageRow:
        """The meaning of a page row's columns for this layout."""
        num_full = sum(group.window is None for group in self.groups)
        windows, begin = [], num_full
        for window in dict.fromkeys(group.window for group in self.groups[num_full:]):
            assert window is not None, "groups that keep every position come first"
            end = begin + sum(group.window == window for group in self.groups)
            windows.append(WindowColumns(window, begin, end))
            begin = end
        return PageRow(num_full, tuple(windows))

    def places(self) -> dict[int, tuple[int, int]]:
        """Layer -> (its group, its slab)."""
        return {
            layer: (index, slab)
            for index, group in enumerate(self.groups)
            for slab, layer in enumerate(group.layers)
        }


def cache_layout(spec: ModelSpec, context_len: int) -> CacheLayout:
    """The cache groups of a model that is served up to ``context_len`` tokens.

    A window that is not shorter than the context counts as no window. If all layers are of one
    kind, they are one group.
    """
    kinds: dict[int | None, list[int]] = defaultdict(list)
    for layer in range(spec.num_layers):
        window = spec.windows[layer] if spec.windows else None
        kinds[window if window is not None and window < context_len else None].append(layer)
    counts = Counter({window: len(layers) for window, layers in kinds.items()})
    num_slabs = _num_slabs(counts, context_len)
    order = sorted(kinds, key=lambda window: (window is not None, window or 0))
    return CacheLayout(
        tuple(
            CacheGroup(tuple(kinds[window][begin : begin + num_slabs]), window)
            for window in order
            for begin in range(0, counts[window], num_slabs)
        ),
        num_slabs,
        spec.cache_parts,
    )


def layout_summary(layout: CacheLayout) -> str:
    """The groups in words, for the log."""
    found = []
    for window, count in Counter(group.window for group in layout.groups).items():
        what = "full attention" if window is None else f"a window of {window} tokens"
        found.append(f"{count} group{'s' * (count > 1)} with {what}")
    return f"{', '.join(found)}, of up to {layout.num_slabs} layers each"


def _num_slabs(counts: Counter[int | None], context_len: int) -> int:
    """Layers per group: the largest number that keeps the waste within PADDING."""

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
