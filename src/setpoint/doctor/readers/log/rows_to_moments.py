"""Stretches of a table as moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from setpoint.core.moments import Moment
from setpoint.doctor.readers.log.table import BatchTable, Column

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


Stretch = tuple[int, int]
"""The rows [begin, end) of a table."""


def moments(
    table: BatchTable,
    cuts: Sequence[int],
    at: Column,
    until: float,
    text: Callable[[int], str],
    first: int,
) -> list[Moment]:
    """One moment for each stretch of lines that begins at ``cuts``.

    at: seconds of each line, repaired; until: of the line after the last one, or NaN; text: the
    text of a line by its number within the block; first: the number of the block's first line.
    """
    stretches = list(zip(cuts, [*cuts[1:], len(table)], strict=True))
    following = [*at[1:], until if until == until else at[-1]]
    figures: dict[str, Sequence[Any]] = {
        "at": [at[begin] for begin, _ in stretches],
        "seconds": [
            at[end - 1] + min(following[end - 1] - at[end - 1], LONGEST_S) - at[begin]
            for begin, end in stretches
        ],
    }
    columns = {name: c for name, c in table.columns.items() if any(value == value for value in c)}
    for name, column in columns.items():
        _figures(figures, name, column, stretches)
    _graphs(figures, columns, stretches)
    found = []
    for index, cut in enumerate(cuts):
        values = {name: column[index] for name, column in figures.items()}
        number = table.line[cut]
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
    figures: dict[str, Sequence[Any]], name: str, column: Column, stretches: Sequence[Stretch]
) -> None:
    known = [[value for value in column[begin:end] if value == value] for begin, end in stretches]
    if name in SUMS or name in ("is_prefill", "is_decode"):
        key = {"is_prefill": "num_prefill", "is_decode": "num_decode"}.get(name, name)
        figures[key] = [int(sum(values)) for values in known]
        if name == "new_tokens":
            figures["largest_prefill"] = [int(max(values, default=0.0)) for values in known]
    elif name in MEANS:
        figures[name] = _means(known)
        if name in MOST:
            figures[f"{name}_max"] = [max(values, default=None) for values in known]
        if name == "queue":
            figures["queue_min"] = [min(values, default=None) for values in known]
    elif ":" in name:
        figures[name] = [max(values, default=None) for values in known]


def _means(known: Iterable[Sequence[float]]) -> list[float | None]:
    return [sum(values) / len(values) if values else None for values in known]


def _graphs(
    figures: dict[str, Sequence[Any]],
    columns: Mapping[str, Column],
    stretches: Sequence[Stretch],
) -> None:
    """Add the graph figures of decode batches only, because prefill batches usually have no
    graph."""
    graph = columns.get("graph")
    if graph is None:
        return
    decode = columns["is_decode"]
    with_graph, without = (
        [
            [row for row in range(begin, end) if decode[row] == 1 and graph[row] == kind]
            for begin, end in stretches
        ]
        for kind in (1, 0)
    )
    figures["graph_hits"] = list(map(len, with_graph))
    figures["graph_misses"] = list(map(len, without))
    running = columns.get("running")
    if running is not None and any(without):
        figures["missed_running"] = _means(
            [running[row] for row in rows if running[row] == running[row]] for rows in without
        )
