"""Page rows: what the scheduler knows about a model's cache groups, and what sequences cost in
pages.

A page holds ``page_size`` tokens of the layers of one group. A *page row* is the list of pages for
``page_size`` consecutive positions of a sequence: one page per group, 0 where a group keeps
nothing. Memory is counted in *pool tokens*: a page holds ``page_size`` of them, whichever group it
serves, so with one group a token takes one pool token (docs/decisions/0030-cache-groups.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

READ_STEP = 32
"""Number of positions that a kernel reads at a time. Positions before the window that are read
along with it have probability zero, but their keys and values must be finite, so they must be the
sequence's own."""


@dataclass(slots=True, frozen=True)
class WindowColumns:
    """The columns [begin, end) of a page row that belong to the groups with this window."""

    window: int
    begin: int
    end: int

    @property
    def num_groups(self) -> int:
        return self.end - self.begin


@dataclass(slots=True, frozen=True)
class PageRow:
    """The meaning of a page row's columns: first the groups that keep every position, then the
    groups with a window."""

    num_full: int = 1
    windows: tuple[WindowColumns, ...] = ()
    read_step: int = READ_STEP

    @property
    def width(self) -> int:
        """Number of pages in a row."""
        return self.windows[-1].end if self.windows else self.num_full

    def first_needed(self, columns: WindowColumns, position: int) -> int:
        """The first position that must be kept for computing the tokens from ``position`` on."""
        return max(0, position - columns.window + 1) // self.read_step * self.read_step


@dataclass(slots=True, frozen=True)
class CacheCosts:
    """The cost of sequences in pool tokens, computed from counts of tokens.

    Every cost is an upper bound: it holds wherever in its pages a sequence's window begins. With
    one group that keeps every position, each cost is the number of tokens.
    """

    row: PageRow = field(default_factory=PageRow)
    page_size: int = 1
    span: int = 1
    """Number of tokens of the largest chunk: the most tokens between the first one that is still to
    be computed and the last one that is planned."""

    def decoding(self, num_tokens: int) -> int:
        """Pool tokens that a sequence of ``num_tokens`` tokens holds while it decodes, in whole
        pages."""
        return self._held(num_tokens, 1)

    def most(self, num_tokens: int) -> int:
        """The most pool tokens that a sequence holds at any time while it grows to ``num_tokens``
        tokens, in whole pages."""
        return self._held(num_tokens, self.span)

    def growth(self, more: float, num_tokens: int = 0, *, span: int | None = None) -> float:
        """Most pool tokens that a sequence with ``num_tokens`` tokens scheduled can take for
        ``more`` further tokens, in chunks of at most ``span`` (1: it decodes; None: the largest
        chunk)."""
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
        """Number of tokens of the longest sequence that can finish alone in a pool of this size.
        With windows the sequence must leave some of the pool free, because admission never gives
        away the last token."""
        if not self.row.windows:
            return pool_tokens // self.row.num_full
        low, high = 0, pool_tokens // max(self.row.num_full, 1) if self.row.num_full else 1 << 31
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.most(middle) < pool_tokens else (low, middle - 1)
        return low

    def capacity(self, pool_tokens: int, context_len: int) -> int:
        """Number of tokens that a pool holds in decoding sequences of ``context_len`` tokens, with
        room for one chunk. If not even one such sequence fits, the length of the longest that
        does."""
        if not self.row.windows:
            return pool_tokens // self.row.num_full
        alone = self.longest(pool_tokens)
        if alone < context_len:
            return alone
        chunk = self.most(context_len) - self.decoding(context_len)
        return (pool_tokens - chunk) * context_len // self.decoding(context_len)

    def pool_for(self, num_tokens: int, context_len: int) -> int:
        """Number of pool tokens that gives a pool the ``capacity`` ``num_tokens``; with windows,
        rounded up to whole pages."""
        if not self.row.windows:
            return num_tokens * self.row.num_full
        needed = self.most(min(num_tokens, context_len)) + 1
        if num_tokens > context_len:
            further = (num_tokens - context_len) * self.decoding(context_len)
            needed += -(-further // context_len)
        return -(-needed // self.page_size) * self.page_size

    def _held(self, num_tokens: int, span: int) -> int:
        whole = -(-num_tokens // self.page_size) * self.page_size
        return self.row.num_full * whole + sum(
            columns.num_groups * min(whole, self._kept(columns.window, span))
            for columns in self.row.windows
        )

    def _kept(self, window: int, span: int) -> int:
        """Most pool tokens that a sequence's pages of one window group take: the window, the chunk
        after it, the positions that rounding down keeps before it, and the pages that are covered
        in part."""
        tokens = window - 1 + self.row.read_step - 1 + self.page_size - 1 + span
        return (-(-tokens // self.page_size) + 1) * self.page_size
