"""Makes columns of numbers from batch lines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, nan

import msgspec

from setpoint.doctor.plausible import MAX_FIGURE, MAX_USAGE
from setpoint.doctor.readers.log.batch_lines import field_of
from setpoint.doctor.readers.log.scan import ShapeMatches
from setpoint.doctor.readers.log.wrapping import seconds_of

Column = list[float]
MAX_RANKS = 256
"""Most ranks of one server. A log with more is not genuine, and the others are left out."""
_DECODER = msgspec.json.Decoder(list[float])


@dataclass(slots=True)
class BatchTable:
    """Lines of one rank in the order of the log. Every column is as long as ``line``; NaN: the line
    does not have the figure."""

    line: list[int]
    """Numbers of the lines within the block."""
    at: Column
    """Seconds; NaN without a timestamp."""
    columns: dict[str, Column]
    """The columns by field of a moment, and by "graph", "is_prefill", "is_decode", "pool:NAME" and
    "other:NAME"."""

    def __len__(self) -> int:
        return len(self.line)

    def part(self, start: int, end: int) -> BatchTable:
        """The lines whose numbers are in [start, end)."""
        return self.rows(bisect_left(self.line, start), bisect_left(self.line, end))

    def rows(self, first: int, last: int) -> BatchTable:
        columns = {name: column[first:last] for name, column in self.columns.items()}
        return BatchTable(self.line[first:last], self.at[first:last], columns)

    def pick(self, rows: Sequence[int]) -> BatchTable:
        columns = {name: [column[row] for row in rows] for name, column in self.columns.items()}
        return BatchTable([self.line[row] for row in rows], [self.at[row] for row in rows], columns)


class _Times(dict[bytes, float]):
    """Timestamp -> seconds. Many lines have the same timestamp."""

    def __missing__(self, stamp: bytes) -> float:
        if len(self) > 100_000:
            self.clear()
        found = seconds_of(stamp) if stamp else None
        self[stamp] = value = nan if found is None else found
        return value


class Tables:
    """Makes tables of the lines that a scanner found."""

    def __init__(self) -> None:
        self._times = _Times()
        self.impossible: list[int] = []
        """Numbers of the lines of the last block that have an impossible figure."""

    def of(self, found: Sequence[ShapeMatches]) -> dict[tuple[str, str], BatchTable]:
        """The tables by origin and rank. Lines with an impossible figure are removed from
        ``found``."""
        self.impossible = []
        parts: dict[tuple[str, str], list[BatchTable]] = {}
        for each in found:
            for rank, table in self._split(each):
                parts.setdefault((each.shape.origin, rank), []).append(table)
        return {key: concatenate(tables) for key, tables in parts.items()}

    def _split(self, found: ShapeMatches) -> Iterable[tuple[str, BatchTable]]:
        if found.shape.stamp_is_last:
            ranks, *values, stamps, fractions = found.columns
        else:
            stamps, fractions, ranks, *values = found.columns
        at = list(map(self._times.__getitem__, stamps))
        if any(fractions):
            parts = _numbers([b"0." + fraction for fraction in fractions])
            at = [second + part for second, part in zip(at, parts, strict=True)]
        prefill = float(found.shape.kind == "prefill")
        columns = {
            "is_prefill": [prefill] * len(at),
            "is_decode": [1 - prefill] * len(at),
        }
        for name, column in zip(found.shape.names, values, strict=True):
            numbers = _numbers(column)
            if name in found.shape.percent:
                numbers = [number / 100 for number in numbers]
            columns[field_of(name)] = numbers
        table = BatchTable(found.lines, at, columns)
        if impossible := _impossible(columns):
            self.impossible += [table.line[row] for row in sorted(impossible)]
            rows = [row for row in range(len(table)) if row not in impossible]
            table, ranks = table.pick(rows), tuple(ranks[row] for row in rows)
            found.lines = table.line
        names = set(ranks)
        if len(names) <= 1:
            yield from ((rank_name(name), table) for name in names)
            return
        rows_of: dict[bytes, list[int]] = {name: [] for name in names}
        for row, rank in enumerate(ranks):
            rows_of[rank].append(row)
        for rank in sorted(names)[:MAX_RANKS]:
            yield rank_name(rank), table.pick(rows_of[rank])


def _impossible(columns: dict[str, Column]) -> set[int]:
    """The rows with an impossible figure. Fields that no check reads may have any finite value."""
    found: set[int] = set()
    for name, column in columns.items():
        group = name.partition(":")[0]
        most = MAX_USAGE if name == "usage" or group == "pool" else MAX_FIGURE
        if group == "other":
            # A sum is not finite if a number in it is not, and usually finite if all are.
            if not isfinite(sum(column)):
                found.update(row for row, value in enumerate(column) if not isfinite(value))
        elif not (isfinite(sum(column)) and min(column) >= 0 and max(column) <= most):
            found.update(row for row, value in enumerate(column) if not 0 <= value <= most)
    return found


def rank_name(rank: bytes) -> str:
    return rank.decode(errors="replace").strip()


def _numbers(texts: Sequence[bytes]) -> Column:
    if texts[0] in (b"True", b"False"):
        return [float(text == b"True") for text in texts]
    try:
        # As a JSON array: several times as fast as float() on each.
        return _DECODER.decode(b"[" + b",".join(texts) + b"]")
    except msgspec.DecodeError:  # nan, inf, 1e999, or no number at all
        return [number if isfinite(number) else nan for number in map(_number, texts)]


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return nan


def concatenate(tables: Sequence[BatchTable]) -> BatchTable:
    """One table in the order of the lines."""
    if len(tables) == 1:
        return tables[0]
    line = [number for table in tables for number in table.line]
    columns: dict[str, Column] = {}
    for name in dict.fromkeys(name for table in tables for name in table.columns):
        columns[name] = whole = []
        for table in tables:
            whole += table.columns.get(name) or [nan] * len(table)
    order = sorted(range(len(line)), key=line.__getitem__)
    return BatchTable(line, [at for table in tables for at in table.at], columns).pick(order)


def retractions(rows: list[tuple[int, float, dict[str, float]]]) -> BatchTable:
    """Retractions as lines of a table: their numbers, times and figures."""
    return BatchTable(
        [number for number, _, _ in rows],
        [at for _, at, _ in rows],
        {
            "is_prefill": [0.0] * len(rows),
            "is_decode": [0.0] * len(rows),
            "retractions": [1.0] * len(rows),
            "retracted": [figures["num"] for _, _, figures in rows],
            "new_token_ratio": [figures.get("ratio_after", nan) for _, _, figures in rows],
        },
    )
