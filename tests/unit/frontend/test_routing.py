"""Which data-parallel rank a client's body chooses."""

from __future__ import annotations

from typing import Any

import pytest

from setpoint.core.errors import RequestError
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.routing import routed


def ranks(count: int, body: dict[str, Any], *, by_room: bool = True) -> list[int | None]:
    requests = [
        Request(rid=str(index), prompt_ids=pack_ids([1]), sampling=SamplingParams(), seed=0)
        for index in range(count)
    ]
    found = routed(requests, body, num_ranks=3, by_room=by_room)
    return [each.options.routed_dp_rank for each in found]


def test_a_room_chooses_the_rank() -> None:
    assert ranks(1, {"bootstrap_room": 7}) == [1]
    assert ranks(1, {"bootstrap_room": (1 << 63) - 1}) == [((1 << 63) - 1) % 3]
    assert ranks(4, {"bootstrap_room": 7}) == [1, 2, 0, 1], "the next prompts have the next rooms"
    assert ranks(4, {"bootstrap_room": [0, 5]}) == [0, 0, 2, 2], "two samples of two prompts"
    assert ranks(2, {"bootstrap_room": 7, "routed_dp_rank": 0}) == [0, 0]


def test_without_that_method_a_room_has_no_effect() -> None:
    for room in (7, [1, 2, 3], None):
        assert ranks(2, {"bootstrap_room": room}, by_room=False) == [None, None]


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (None, "bootstrap_room is missing"),
        (-1, "from 0 to"),
        (1 << 63, "from 0 to"),
        ("7", "from 0 to"),
        (True, "from 0 to"),
        (1.5, "from 0 to"),
        ([], "one room for each prompt, not 0"),
        ([1, 2, 3], "one room for each prompt, not 3"),
        ([1, None], "from 0 to"),
    ],
)
def test_a_wrong_room_is_refused(room: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ranks(2, {"bootstrap_room": room})


@pytest.mark.parametrize("rank", [-1, 3, 10**20, "1" * 5000, "\u00b2", "0_1", "", "1.0"])
def test_a_wrong_rank_is_refused(rank: Any) -> None:
    with pytest.raises(
        RequestError, match=r"routed_dp_rank is .*; this server has the ranks 0 to 2"
    ):
        ranks(1, {"routed_dp_rank": rank})
