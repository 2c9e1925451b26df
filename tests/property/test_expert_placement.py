"""Placements of experts: whatever the loads, each expert has a slot, every rank has equally many, and
no rank is busier than before."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from setpoint.core.expert_placement import (
    Placement,
    balanced,
    balancedness,
    of_experts,
    places,
    rank_loads,
    trivial,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Placement, int]:
    """(load of each expert, a placement, number of ranks)"""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    experts = draw(st.integers(1, 40))
    slots = -(-(experts + draw(st.integers(0, 20))) // ranks) * ranks
    load = draw(st.lists(st.integers(0, 10**6), min_size=experts, max_size=experts))
    placement = draw(st.permutations(trivial(experts, slots)))
    return np.array(load, np.int64), tuple(placement), ranks


@given(cases())
def test_every_expert_is_somewhere_and_no_rank_is_busier(
    case: tuple[np.ndarray, Placement, int],
) -> None:
    load, current, ranks = case
    found = balanced(load, current, ranks)
    assert len(found) == len(current)
    assert set(found) == set(range(len(load)))
    before, after = (rank_loads(load, each, ranks) for each in (current, found))
    assert after.max() <= before.max()
    assert np.isclose(after.sum(), load.sum())
    assert found == current or after.max() < before.max()
    assert balanced(load, current, ranks) == found


@given(cases())
def test_tables_name_the_slots_of_an_expert(case: tuple[np.ndarray, Placement, int]) -> None:
    load, placement, _ = case
    table = places(placement, len(load))
    copies = Counter(placement)
    for expert, (number, *slots) in enumerate(table.tolist()):
        assert number == copies[expert]
        assert [placement[slot] for slot in slots[:number]] == [expert] * number
    by_slot = np.arange(len(placement))
    found = of_experts(by_slot, placement, len(load))
    assert [sum(s for s, e in enumerate(placement) if e == each) for each in range(len(load))] == (
        found.tolist()
    )


def test_a_busy_expert_gets_the_redundant_slots() -> None:
    load = np.array([900, 10, 10, 10, 10, 10, 10, 10])
    before = trivial(8, 12)
    found = balanced(load, before, 4)
    assert Counter(found)[0] == 4
    assert all(0 in found[at : at + 3] for at in range(0, 12, 3))
    ranks = [rank_loads(load, each, 4) for each in (before, found)]
    assert balancedness(ranks[0]) < 0.6 < 0.95 < balancedness(ranks[1])


def test_equal_loads_stay_where_they_are() -> None:
    for load in (np.zeros(8, np.int64), np.full(8, 5)):
        assert balanced(load, trivial(8, 8), 2) == trivial(8, 8)
    assert balancedness(np.zeros((3, 4), np.int64)) == 1.0
    assert balancedness(np.array([[4, 0], [0, 0], [2, 2]])) == 0.75
