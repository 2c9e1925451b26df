"""Surrogate ids: two sequences have equal ones exactly as far as their ids were equal, at every
place where a prefix may end."""

from __future__ import annotations

import random

import numpy as np
import pytest

from setpoint.core.request import pack_ids
from setpoint.recording.chain import Chain, Places
from setpoint.recording.surrogates import SurrogateIds

KEY = b"key"


def common(one: list[int], other: list[int]) -> int:
    """How many tokens are equal at the beginning."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize(("page_size", "also"), [(1, 0), (4, 0), (4, 6), (4, 8), (16, 3), (1, 32)])
def test_surrogates_are_equal_as_far_as_ids_were(page_size: int, also: int) -> None:
    places, draw = Places(page_size, also), random.Random(page_size + also)
    surrogates = SurrogateIds(places)
    given: list[tuple[list[int], list[int]]] = []
    for _ in range(40):
        ids = [draw.randrange(2) for _ in range(draw.randrange(50))]
        if given and draw.random() < 0.7:
            before = draw.choice(given)[0]
            ids = before[: draw.randrange(len(before) + 1)] + ids
        hashes = Chain(places, KEY).extend(pack_ids(np.array(ids, np.int32)))
        made = surrogates.of(len(ids), hashes).tolist()
        assert len(made) == len(set(made)) == len(ids)
        for other, others in given:
            reached = [0, *(each for each in range(1, 200) if is_place(places, each))]
            wanted = max(each for each in reached if each <= common(ids, other))
            assert common(made, others) == wanted
            assert set(made[wanted:]).isdisjoint(others)
        given.append((ids, made))


def is_place(places: Places, position: int) -> bool:
    return places.after(position - 1) == position


@pytest.mark.parametrize(("page_size", "also"), [(1, 0), (4, 6), (4, 8), (16, 3), (5, 100)])
def test_places_are_counted_as_they_come(page_size: int, also: int) -> None:
    places = Places(page_size, also)
    one_by_one = [each for each in range(1, 200) if is_place(places, each)]
    for count in (0, 1, 2, 7, 11):
        assert places.ends(count).tolist() == one_by_one[:count]
