"""The sizes of the attention kernels (kernels/triton/attention.py): tiles by chip, how rows are cut
into pieces, and how much is launched and kept for a step of T tokens in n rows.

Pure numbers; imports no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from setpoint.engine.kernels.ops import KernelsUnavailable

GRAIN = 128
"""Pieces begin at a multiple of it, which every tile divides."""
DOUBLINGS = 12
"""Number of times that a piece's smallest size may double: a bound on a row's length."""
MOST_PIECES = 32
FIELDS = 5
"""Arrays [n] of a plan: the running sum of the number of items (an item: one piece for one block),
positions of a piece, number of pieces, first unit of scratch memory (a unit: one piece of one
token), and the running sum of the number of tokens whose pieces are to be joined."""


def power_of_2(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


@dataclass(slots=True, frozen=True)
class Tiles:
    """What a kernel is compiled with: rows of queries, positions of a step of its loop, warps, and
    stages in which the loop's loads are under way."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


NARROW = {
    80: {128: Tiles(16, 64, 4, 3), 256: Tiles(16, 32, 4, 3), 576: Tiles(16, 64, 8, 2)},
}
"""Compute capability from which on -> largest size of a head (of K or V) -> tiles. On sm_80, sm_90a
and sm_100a no kernel of narrow rows spills registers."""
WIDE = {
    80: {128: Tiles(64, 64, 4, 3), 256: Tiles(64, 32, 8, 2), 576: Tiles(32, 32, 8, 2)},
    90: {128: Tiles(128, 64, 8, 3), 256: Tiles(64, 32, 8, 2), 576: Tiles(32, 32, 8, 2)},
}
MANY_HEADS = 16
"""With more query heads per key/value head, a narrow row fills tiles like a wide one."""
FP32 = {128: Tiles(16, 32, 4, 2), 256: Tiles(16, 32, 4, 2), 576: Tiles(16, 16, 4, 1)}
"""Tiles for fp32, for both classes: its products are sums of single numbers on every chip."""


def tiles(capability: int, size: int, itemsize: int, group: int, wide: bool) -> Tiles:
    """The tiles for heads of this size, numbers of so many bytes and so many query heads per
    key/value head; capability 0: those of the newest GPU. Raises KernelsUnavailable if there are
    none."""
    many = wide or group > MANY_HEADS
    table = WIDE if many else NARROW
    capability = max(each for each in table if each <= capability or not capability)
    by_size = FP32 if itemsize == 4 else table[capability]
    for largest, found in by_size.items():
        if size <= largest:
            return found if wide or not many else replace(found, block_m=min(64, found.block_m))
    raise KernelsUnavailable(f"the head dimension {size} exceeds {max(by_size)}")


@dataclass(slots=True, frozen=True)
class RowClass:
    """How the rows of one class are cut, and the sizes of what is launched for them."""

    wide: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    tiles: Tiles
    piece: int
    """Positions of the smallest piece: a multiple of GRAIN."""
    every: bool = False
    """Whether rows with one token belong to the class of wide rows, too. No row is then cut, and a
    token's result has the same bits in every chunk: its program reads the positions before it in
    tiles that begin at the same ones."""
    programs: int = 256
    """A row is cut until it has about so many programs. It is no property of the chip, so that a
    row has the same bits on chips of one generation."""

    @property
    def block_heads(self) -> int:
        """Query heads of a block."""
        return min(self.num_heads // self.num_kv_heads, self.tiles.block_m)

    @property
    def block_q(self) -> int:
        """Tokens of a block."""
        return self.tiles.block_m // self.block_heads if self.wide else 1

    @property
    def head_programs(self) -> int:
        """Programs of one item."""
        return self.num_kv_heads * -(-self.num_heads // self.num_kv_heads // self.block_heads)

    @property
    def work(self) -> int:
        """Items of a row up to which it is cut."""
        return 1 if self.every else max(1, self.programs // self.head_programs)

    @property
    def most(self) -> int:
        """Most pieces of a row."""
        return min(MOST_PIECES, self.work)

    @property
    def unit_numbers(self) -> int:
        """Numbers of a unit of scratch memory."""
        return self.num_heads * (self.value_dim + 2)

    def _row_units(self, tokens: int) -> int:
        """Most units of a row of a step of so many tokens."""
        if self.most == 1:
            return 0
        if not self.wide:
            return self.most
        return min(tokens * self.most, self.block_q * self.work)

    def units(self, tokens: int, rows: int) -> int:
        """Most units of a step."""
        if not self.wide:
            return rows * self._row_units(tokens)
        units = min(rows, tokens // 2) * self._row_units(tokens)
        return min(tokens * self.most, units)

    def turns(self, tokens: int, rows: int, room: int) -> int:
        """Number of times that the kernels are launched if a turn begins at most at unit
        ``room``."""
        return -(-self.units(tokens, rows) // room) or 1

    def scratch(self, tokens: int, rows: int, room: int) -> int:
        """Units of scratch memory."""
        return min(self.units(tokens, rows), room + self._row_units(tokens))

    def items(self, tokens: int, rows: int) -> int:
        """Most items of a step."""
        if not self.wide:
            return rows * self.most
        wide = rows if self.every else min(rows, tokens // 2)
        return tokens // self.block_q + wide * (1 + self.work)

    def constants(self) -> dict[str, int]:
        """What ``attention_pieces`` is compiled for."""
        main = 1 << (self.head_dim.bit_length() - 1)
        rest = self.head_dim - main
        rest = max(16, power_of_2(rest)) if rest else 0
        if main + rest >= power_of_2(self.head_dim):
            main, rest = power_of_2(self.head_dim), 0
        return {
            "HEADS": self.num_heads,
            "KV_HEADS": self.num_kv_heads,
            "D": self.head_dim,
            "DV": self.value_dim,
            "MAIN": max(16, main),
            "REST": rest,
            "BLOCK_DV": max(16, power_of_2(self.value_dim)),
            "BLOCK_HEADS": self.block_heads,
            "BLOCK_Q": self.block_q,
            "BLOCK_M": self.tiles.block_m,
            "BLOCK_N": self.tiles.block_n,
            "WIDE": self.wide,
            "num_warps": self.tiles.num_warps,
            "num_stages": self.tiles.num_stages,
        }
