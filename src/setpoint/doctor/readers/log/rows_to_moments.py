"""Stretches of a table as moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from setpoint.core.moments import Moment
from setpoint.doctor.readers.log.table import Column, Table

MEANS = (
    "running",
    "queue",
    "usage",
    "tokens",
    "gen_throughput",
    "input_throughput",
    "pending_tokens",
    "preparing",
    "new_token_ratio",
)
SUMS = ("new_seqs", "new_tokens", "cached_tokens", "retractions", "retracted")
MOST = ("running", "queue", "usage")
LONGEST_S = 60.0
"""A moment lasts until the next line of its rank, but no longer than this: beyond it the engine had
nothing to do."""


def moments(
    table: Table,
    cuts: NDArray[np.int64],
    at: Column,
    until: float,
    text: Callable[[int], str],
    first: int,
) -> list[Moment]:
    """One moment for each stretch of lines that begins at ``cuts``.

    at: seconds of each line, repaired; until: of the line after the last one, or NaN; text: the
    text of a line by its number within the block; first: the number of the block's first line.
    """
    ends = np.append(cuts[1:], len(table))
    following = np.append(at[1:], until if until == until else at[-1])
    begins = at[cuts]
    seconds = np.minimum(following - at, LONGEST_S)
    lasts = at[ends - 1] + seconds[ends - 1] - begins
    figures: dict[str, list[Any]] = {"at": begins.tolist(), "seconds": lasts.tolist()}
    columns = {name: c for name, c in table.columns.items() if c.size and not np.isnan(c).all()}
    for name, column in columns.items():
        _figures(figures, name, column, cuts)
    _prefills(figures, columns, cuts)
    _graphs(figures, columns, cuts)
    found = []
    for index, cut in enumerate(cuts.tolist()):
        values = {name: column[index] for name, column in figures.items()}
        number = int(table.line[cut])
        found.append(_moment(values, number + first, text(number)))
    return found


def _moment(values: Mapping[str, Any], line: int, text: str) -> Moment:
    fields: dict[str, Any] = {"other_usage": {}, "other": {}}
    for name, value in values.items():
        if value is None:
            continue
        group, colon, key = name.partition(":")
        if colon:
            fields["other_usage" if group == "pool" else "other"][key] = value
        else:
            fields[name] = value
    return Moment(line=line, text=text, **fields)


def _figures(
    figures: dict[str, list[Any]], name: str, column: Column, cuts: NDArray[np.int64]
) -> None:
    if name in SUMS or name in ("is_prefill", "is_decode"):
        key = {"is_prefill": "num_prefill", "is_decode": "num_decode"}.get(name, name)
        totals = np.add.reduceat(np.nan_to_num(column), cuts)
        figures[key] = [int(total) for total in totals]
    elif name in MEANS:
        figures[name] = _known(_means(column, cuts))
        if name in MOST:
            figures[f"{name}_max"] = _known(np.fmax.reduceat(column, cuts))
        if name == "queue":
            figures["queue_min"] = _known(np.fmin.reduceat(column, cuts))
    elif ":" in name:
        figures[name] = _known(np.fmax.reduceat(column, cuts))


def _means(column: Column, cuts: NDArray[np.int64]) -> Column:
    known = ~np.isnan(column)
    count = np.add.reduceat(known.astype(np.float64), cuts)
    total = np.add.reduceat(np.where(known, column, 0.0), cuts)
    means: Column = np.divide(total, count, out=np.full(len(cuts), np.nan), where=count > 0)
    return means


def _known(column: Column) -> list[float | None]:
    return [value if value == value else None for value in column.tolist()]


def _prefills(
    figures: dict[str, list[Any]], columns: Mapping[str, Column], cuts: NDArray[np.int64]
) -> None:
    if "new_tokens" in columns:
        largest = np.fmax.reduceat(np.nan_to_num(columns["new_tokens"]), cuts)
        figures["largest_prefill"] = [int(tokens) for tokens in largest]


def _graphs(
    figures: dict[str, list[Any]], columns: Mapping[str, Column], cuts: NDArray[np.int64]
) -> None:
    """Add the graph figures of decode batches only, because prefill batches usually have no
    graph."""
    graph = columns.get("graph")
    if graph is None:
        return
    decode = columns["is_decode"] == 1
    missed = decode & (graph == 0)
    figures["graph_hits"] = [
        int(n) for n in np.add.reduceat(decode & (graph == 1), cuts, dtype=int)
    ]
    figures["graph_misses"] = [int(n) for n in np.add.reduceat(missed, cuts, dtype=int)]
    running = columns.get("running")
    if running is not None and missed.any():
        figures["missed_running"] = _known(_means(np.where(missed, running, np.nan), cuts))
