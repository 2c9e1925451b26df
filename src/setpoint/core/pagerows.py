"""Page rows: what the scheduler knows of a model's cache groups, and what sequences cost in pages.

A page holds ``page_size`` tokens of the layers of one group. A *page row* is the pages of one
``page_size`` stretch of a sequence, one per group, 0 where a group keeps nothing. Memory is counted
in *pool tokens*: a page holds ``page_size`` of them, whichever group it serves, so that with one
group a token is a pool token (docs/decisions/0030-cache-groups.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

READ_STEP = 32
"""Kernels read keys in groups of so many positions; those before the window count with a
probability of zero, so they must be finite: the sequence's own."""


@dataclass(slots=True, frozen=True)
class WindowColumns:
    """The columns [begin, end) of a page row that belong to groups with this window."""

    window: int
    begin: int
    end: int

    @property
    def num_groups(self) -> int:
        return self.end - self.begin


@dataclass(slots=True, frozen=True)
class PageRow:
    """What the columns of a page row are: first those of groups that keep every position, then
    windows."""

    num_full: int = 1
    windows: tuple[WindowColumns, ...] = ()
    read_step: int = READ_STEP

    @property
    def width(self) -> int:
        """Pages in a row."""
        return self.windows[-1].end if self.windows else self.num_full

    def first_needed(self, columns: WindowColumns, position: int) -> int:
        """The first position that is read for the tokens from ``position`` on."""
        return max(0, position - columns.window + 1) // self.read_step * self.read_step


@dataclass(slots=True, frozen=True)
class CacheCosts:
    """What sequences cost, in pool tokens; pure arithmetic on counts of tokens.

    Every count is a bound from above that holds wherever in its pages a sequence begins to slide.
    With one group that keeps every position each cost is the number of tokens.
    """

    row: PageRow = field(default_factory=PageRow)
    page_size: int = 1
    span: int = 1
    """Most tokens between the first that may still be computed and the last that is planned: those
    of the largest chunk."""

    def decoding(self, num_tokens: int) -> int:
        """What a sequence of so many tokens holds while it decodes, in whole pages."""
        return self._held(num_tokens, 1)

    def most(self, num_tokens: int) -> int:
        """The most that a sequence holds on its way to so many tokens, in whole pages."""
        return self._held(num_tokens, self.span)

    def growth(self, more: float, num_tokens: int = 0, *, span: int | None = None) -> float:
        """What a sequence with ``num_tokens`` tokens scheduled can take for ``more`` of them, with
        chunks of at most ``span`` (1: it decodes; None: the largest)."""
        if not self.row.windows:
            return self.row.num_full * more
        total = self.row.num_full * more
        for columns in self.row.windows:
            limit = self._kept(columns.window, self.span if span is None else span)
            first = self.row.first_needed(columns, num_tokens) // self.page_size * self.page_size
            held = num_tokens - first
            total += columns.num_groups * min(more, limit - held)
        return total

    def longest(self, pool_tokens: int) -> int:
        """Tokens of the longest sequence that finishes alone in a pool of this size; with windows a
        little of the pool is left, since admission leaves the last token of it to nobody."""
        if not self.row.windows:
            return pool_tokens // self.row.num_full
        low, high = 0, pool_tokens // max(self.row.num_full, 1) if self.row.num_full else 1 << 31
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.most(middle) < pool_tokens else (low, middle - 1)
        return low

    def capacity(self, pool_tokens: int, context_len: int) -> int:
        """Tokens that a pool holds in sequences of ``context_len``: decoding ones, and room for one
        chunk; if not even one fits, those of the longest that does."""
        if not self.row.windows:
            return pool_tokens // self.row.num_full
        alone = self.longest(pool_tokens)
        if alone < context_len:
            return alone
        chunk = self.most(context_len) - self.decoding(context_len)
        return (pool_tokens - chunk) * context_len // self.decoding(context_len)

    def pool_for(self, num_tokens: int, context_len: int) -> int:
        """Pool tokens of a pool whose ``capacity`` is ``num_tokens``, with windows in whole
        pages."""
        if not self.row.windows:
            return num_tokens * self.row.num_full
        needed = self.most(min(num_tokens, context_len)) + 1
        if num_tokens > context_len:
            beside = (num_tokens - context_len) * self.decoding(context_len)
            needed += -(-beside // context_len)
        return -(-needed // self.page_size) * self.page_size

    def _held(self, num_tokens: int, span: int) -> int:
        whole = -(-num_tokens // self.page_size) * self.page_size
        return self.row.num_full * whole + sum(
            columns.num_groups * min(whole, self._kept(columns.window, span))
            for columns in self.row.windows
        )

    def _kept(self, window: int, span: int) -> int:
        """Most tokens of a window group's pages: the window, the chunk behind it, what rounding
        down keeps before it, and the pages that are covered in part."""
        tokens = window - 1 + self.row.read_step - 1 + self.page_size - 1 + span
        return (-(-tokens // self.page_size) + 1) * self.page_size
