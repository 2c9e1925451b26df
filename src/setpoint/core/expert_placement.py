"""Where the experts of a mixture lie if ranks hold whole experts (--ep-size).

The ranks have numbered *slots*, equally many each, rank 0 the first ones. A placement says which
expert is in each slot of a layer; with more slots than experts, some experts are in several.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from setpoint.core.errors import ConfigError
from setpoint.core.jsonfile import parse_json
from setpoint.core.plain_file import read_plain

Placement = tuple[int, ...]
"""The expert in each slot of a layer."""
Loads = np.ndarray[Any, np.dtype[np.int64]]
"""A number of tokens for each expert, slot or rank (the last axis)."""

ROUNDING = 1e-9
"""Relative differences of sums that mean nothing."""


def trivial(num_experts: int, num_slots: int) -> Placement:
    """One expert after the other, and from the first one again in the slots that remain."""
    return tuple(slot % num_experts for slot in range(num_slots))


def places(placement: Placement, num_experts: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """``Ops.place_experts``'s table: [E, 1 + the most slots that an expert may have]."""
    table = np.zeros((num_experts, 2 + len(placement) - num_experts), np.int32)
    for slot, expert in enumerate(placement):
        table[expert, 0] += 1
        table[expert, table[expert, 0]] = slot
    return table


def of_experts(load: Loads, placement: Placement, num_experts: int) -> Loads:
    """The tokens of each expert, from those of each slot."""
    found = np.zeros(num_experts, np.int64)
    np.add.at(found, list(placement), load)
    return found


def balancedness(loads: Loads) -> float:
    """Mean / max of loads [..., N], averaged over what has any: 1 if all are equal, 1 / N if one
    has everything (SGLang's ``eplb_balancedness``). 1 without any load."""
    most = loads.max(axis=-1)
    used = most > 0
    return float((loads.mean(axis=-1)[used] / most[used]).mean()) if used.any() else 1.0


def rank_loads(load: Loads, placement: Placement, num_ranks: int) -> Loads:
    """The tokens that each rank would compute of load [E], divided equally among the slots of an
    expert."""
    number = np.bincount(placement, minlength=len(load))
    share = load / np.maximum(number, 1)
    found: Loads = share[list(placement)].reshape(num_ranks, -1).sum(axis=1)
    return found


def balanced(load: Loads, current: Placement, num_ranks: int) -> Placement:
    """A placement whose busiest rank has fewer tokens of load [E] than in ``current``, or
    ``current``. Each expert has a slot at least.

    Greedy, as in DeepSeek's EPLB (https://github.com/deepseek-ai/EPLB): the redundant slots go, one
    by one, to the expert with the most tokens per slot; then each copy, the busiest first, goes to
    the rank with the least load that has a slot left and, if possible, no copy yet. Ranks get the
    numbers with which they keep most of their experts.
    """
    num_experts, per_rank = len(load), len(current) // num_ranks
    number = np.ones(num_experts, np.int64)
    for _ in range(len(current) - num_experts):
        shares = np.where(number < num_ranks, load / number, -1.0)
        number[int(shares.argmax())] += 1
    copies = sorted(
        (expert for expert in range(num_experts) for _ in range(number[expert])),
        key=lambda expert: (-load[expert] / number[expert], expert),
    )
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for expert in copies:
        free = [rank for rank in range(num_ranks) if len(held[rank]) < per_rank]
        rank = min(free, key=lambda rank: (expert in held[rank], loads[rank], rank))
        held[rank].append(expert)
        loads[rank] += load[expert] / number[expert]
    found = tuple(expert for experts in _renumbered(held, current) for expert in experts)
    before, after = (rank_loads(load, each, num_ranks).max() for each in (current, found))
    return found if after < before * (1 - ROUNDING) else current


def _renumbered(held: Sequence[list[int]], current: Placement) -> list[list[int]]:
    """The experts of each rank, ranks renumbered so that they keep many of their experts."""
    per_rank = len(held[0])
    before = [set(current[at : at + per_rank]) for at in range(0, len(current), per_rank)]
    pairs = [(rank, index) for rank in range(len(held)) for index in range(len(held))]
    found: dict[int, int] = {}
    for rank, index in sorted(pairs, key=lambda pair: -len(before[pair[0]] & set(held[pair[1]]))):
        if rank not in found and index not in found.values():
            found[rank] = index
    return [held[found[rank]] for rank in range(len(held))]


MAP, COUNT = "physical_to_logical_map", "logical_count"
"""Keys of a file for --init-expert-location, as in SGLang."""
LARGEST_NUMBER = 2**50
"""The largest number in such a file: sums of thousands of them still fit into int64."""
FILE_MIB = 64
"""Most MiB of such a file; a hundred layers of a thousand experts take 2 MB."""


def first_placements(
    location: str, *, num_layers: int, num_experts: int, num_slots: int, num_ranks: int
) -> list[Placement]:
    """The placement of each layer with experts at the start (--init-expert-location): "trivial", or
    a JSON file with the expert in each slot of each of these layers (MAP) or with the tokens of
    each expert (COUNT). Raises ConfigError."""
    first = trivial(num_experts, num_slots)
    if location == "trivial":
        return [first] * num_layers
    rows, is_count = _rows(Path(location), num_layers)
    wanted = num_experts if is_count else num_slots
    for layer, row in enumerate(rows):
        where = f"--init-expert-location {location}: row {layer} of {COUNT if is_count else MAP}"
        if len(row) != wanted:
            raise ConfigError(f"{where} has {len(row)} numbers, but there must be {wanted}.")
        if not is_count and set(row) != set(range(num_experts)):
            raise ConfigError(
                f"{where} must have each expert from 0 to {num_experts - 1} and no other number."
            )
    if not is_count:
        return [tuple(row) for row in rows]
    return [balanced(np.array(row, np.int64), first, num_ranks) for row in rows]


def _rows(path: Path, num_layers: int) -> tuple[list[list[int]], bool]:
    """A file's numbers by layer, and whether they are counts."""
    try:
        content = parse_json(read_plain(path, FILE_MIB).decode())
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"--init-expert-location {path} cannot be read: {why}.") from None
    given = [key for key in (MAP, COUNT) if isinstance(content, dict) and key in content]
    if len(given) != 1:
        raise ConfigError(
            f"--init-expert-location {path} must have either {MAP} or {COUNT}, a list of lists."
        )
    rows = content[given[0]]
    if not _is_table(rows) or len(rows) != num_layers:
        raise ConfigError(
            f"--init-expert-location {path}: {given[0]} must be a list of numbers from 0 to"
            f" {LARGEST_NUMBER} for each of the {num_layers} layers with experts."
        )
    return rows, given[0] == COUNT


def _is_table(rows: object) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, list)
        and all(type(number) is int and 0 <= number <= LARGEST_NUMBER for number in row)
        for row in rows
    )
