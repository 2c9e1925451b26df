"""Makes columns of numbers from batch lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import msgspec
import numpy as np
from numpy.typing import NDArray

from setpoint.doctor.plausible import MAX_FIGURE, MAX_USAGE
from setpoint.doctor.readers.log.batch_lines import field_of
from setpoint.doctor.readers.log.scan import Found
from setpoint.doctor.readers.log.wrapping import seconds_of

Column = NDArray[np.float64]
MAX_RANKS = 256
"""Most ranks of one server. A log with more is not genuine, and the others are left out."""
_DECODER = msgspec.json.Decoder(list[float])


@dataclass(slots=True)
class Table:
    """Lines of one rank in the order of the log. Every column is as long as ``line``; NaN: the line
    does not have the figure."""

    line: NDArray[np.int64]
    """Numbers of the lines within the block."""
    at: Column
    """Seconds; NaN without a timestamp."""
    columns: dict[str, Column]
    """The columns by field of a moment, and by "graph", "is_prefill", "is_decode", "pool:NAME" and
    "other:NAME"."""

    def __len__(self) -> int:
        return len(self.line)

    def part(self, start: int, end: int) -> Table:
        """The lines whose numbers are in [start, end)."""
        first, last = np.searchsorted(self.line, [start, end]).tolist()
        return self.rows(first, last)

    def rows(self, first: int, last: int) -> Table:
        columns = {name: column[first:last] for name, column in self.columns.items()}
        return Table(self.line[first:last], self.at[first:last], columns)

    def where(self, chosen: NDArray[np.bool_]) -> Table:
        columns = {name: column[chosen] for name, column in self.columns.items()}
        return Table(self.line[chosen], self.at[chosen], columns)


class _Times(dict[bytes, float]):
    """Timestamp -> seconds. Many lines have the same timestamp."""

    def __missing__(self, stamp: bytes) -> float:
        if len(self) > 100_000:
            self.clear()
        found = seconds_of(stamp) if stamp else None
        self[stamp] = value = float("nan") if found is None else found
        return value


class Tables:
    """Makes tables of the lines that a scanner found."""

    def __init__(self) -> None:
        self._times = _Times()
        self.impossible: list[int] = []
        """Numbers of the lines of the last block that have an impossible figure."""

    def of(self, found: Sequence[Found]) -> dict[tuple[str, str], Table]:
        """The tables by origin and rank. Lines with an impossible figure are removed from
        ``found``."""
        self.impossible = []
        parts: dict[tuple[str, str], list[Table]] = {}
        for each in found:
            for rank, table in self._split(each):
                parts.setdefault((each.shape.origin, rank), []).append(table)
        return {key: concatenate(tables) for key, tables in parts.items()}

    def _split(self, found: Found) -> Iterable[tuple[str, Table]]:
        if found.shape.stamp_is_last:
            ranks, *values, stamps, fractions = found.columns
        else:
            stamps, fractions, ranks, *values = found.columns
        at = np.fromiter(map(self._times.__getitem__, stamps), np.float64, len(stamps))
        if any(fractions):
            at += _numbers([b"0." + fraction for fraction in fractions])
        prefill = float(found.shape.kind == "prefill")
        columns = {
            "is_prefill": np.full(len(at), prefill),
            "is_decode": np.full(len(at), 1 - prefill),
        }
        for name, column in zip(found.shape.names, values, strict=True):
            numbers = _numbers(column)
            columns[field_of(name)] = numbers / 100 if name in found.shape.percent else numbers
        table = Table(np.array(found.lines, np.int64), at, columns)
        possible = _possible(columns)
        if not possible.all():
            self.impossible += table.line[~possible].tolist()
            found.lines = table.line[possible].tolist()
            at, table = at[possible], table.where(possible)
            columns, ranks = table.columns, tuple(compress(ranks, possible))
        names = set(ranks)
        if len(names) <= 1:
            yield from ((rank_name(name), table) for name in names)
            return
        codes = np.array(ranks)
        for rank in sorted(names)[:MAX_RANKS]:
            yield rank_name(rank), table.where(codes == rank)


def _possible(columns: dict[str, Column]) -> NDArray[np.bool_]:
    """Whether all figures of each line are possible. Fields that no check reads may have any finite
    value."""
    possible = np.ones(len(columns["is_prefill"]), np.bool_)
    for name, column in columns.items():
        group = name.partition(":")[0]
        if group == "other":
            possible &= np.isfinite(column)
        else:  # NaN is not at least 0
            most = MAX_USAGE if name == "usage" or group == "pool" else MAX_FIGURE
            possible &= (column >= 0) & (column <= most)
    return possible


def rank_name(rank: bytes) -> str:
    return rank.decode(errors="replace").strip()


def _numbers(texts: Sequence[bytes]) -> Column:
    if texts[0] in (b"True", b"False"):
        return np.fromiter(map(b"True".__eq__, texts), np.float64, len(texts))
    try:
        # As a JSON array: several times as fast as float() on each.
        return np.array(_DECODER.decode(b"[" + b",".join(texts) + b"]"))
    except msgspec.DecodeError:  # nan, inf, 1e999, or no number at all
        numbers = np.array([_number(text) for text in texts])
        numbers[~np.isfinite(numbers)] = np.nan
        return numbers


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def concatenate(tables: Sequence[Table]) -> Table:
    """One table in the order of the lines."""
    if len(tables) == 1:
        return tables[0]
    line = np.concatenate([table.line for table in tables])
    order = np.argsort(line, kind="stable")
    columns = {}
    for name in dict.fromkeys(name for table in tables for name in table.columns):
        parts = [table.columns.get(name, np.full(len(table), np.nan)) for table in tables]
        columns[name] = np.concatenate(parts)[order]
    return Table(line[order], np.concatenate([table.at for table in tables])[order], columns)


def retractions(rows: list[tuple[int, float, dict[str, float]]]) -> Table:
    """Retractions as lines of a table: their numbers, times and figures."""
    none = np.zeros(len(rows))
    ratios = [figures.get("ratio_after", float("nan")) for _, _, figures in rows]
    return Table(
        np.array([number for number, _, _ in rows], np.int64),
        np.array([at for _, at, _ in rows]),
        {
            "is_prefill": none,
            "is_decode": none,
            "retractions": none + 1.0,
            "retracted": np.array([figures["num"] for _, _, figures in rows]),
            "new_token_ratio": np.array(ratios),
        },
    )
