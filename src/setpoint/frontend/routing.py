"""Reads which data-parallel rank a client has chosen for its requests: with a header, a field of
the body, or a bootstrap room (--load-balance-method follow_bootstrap_room)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from setpoint.core.bounds import INT64_MAX
from setpoint.core.conversion import as_whole
from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt
from setpoint.core.request import Request
from setpoint.frontend.arrival import arrival
from setpoint.frontend.bootstrap_rooms import rooms_of

RANK_HEADER = "X-Data-Parallel-Rank"
"""The header; it overrides the fields of the body."""
RANK_FIELDS = ("routed_dp_rank", "data_parallel_rank")
ROOM_FIELD = "bootstrap_room"
MAX_DIGITS = 20
"""Most digits of a rank, leading zeros included."""


def routed(
    requests: Sequence[Request], received: Mapping[str, Any], *, num_ranks: int, by_room: bool
) -> Sequence[Request]:
    """The requests with the rank that their client has chosen in the body ``received`` or in the
    header, if any. by_room: whether a bootstrap room determines the rank. Raises RequestError for a
    rank that does not exist, and for a bootstrap room that is missing or invalid."""
    rank = _asked_rank(received, num_ranks)
    if rank is not None:
        return [each.routed_to(rank) for each in requests]
    if not by_room:
        return requests
    rooms = rooms_of(requests) or _rooms(received.get(ROOM_FIELD), len(requests))
    return [each.routed_to(room % num_ranks) for each, room in zip(requests, rooms, strict=True)]


def _asked_rank(received: Mapping[str, Any], num_ranks: int) -> int | None:
    name, wanted = RANK_HEADER, arrival().headers.get(RANK_HEADER.lower())
    for field in RANK_FIELDS:
        if wanted is None:
            name, wanted = field, as_whole(received.get(field))
    if wanted is None:
        return None
    text = str(wanted)
    # Long numbers are not converted: int() raises ValueError for more than 4,300 digits.
    rank = int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else -1
    if not 0 <= rank < num_ranks:
        raise RequestError(
            f"{name} is {excerpt(text)}; this server has the ranks 0 to {num_ranks - 1}."
        )
    return rank


def _rooms(given: Any, count: int) -> list[int]:
    """The bootstrap room of each request. A single number is the bootstrap room of the first
    request, and the others get the following numbers. A list has one bootstrap room per prompt,
    which all samples of the prompt share."""
    if given is None:
        raise RequestError(
            f"{ROOM_FIELD} is missing. With --load-balance-method follow_bootstrap_room, this"
            " server needs it to choose the engine; a router must set it."
        )
    if isinstance(given, list):
        if not given or count % len(given):
            raise RequestError(
                f"{ROOM_FIELD} must have one room for each prompt, not {len(given)} rooms."
            )
        rooms = [room for room in given for _ in range(count // len(given))]
    else:
        rooms = [given] * count
    rooms = list(map(as_whole, rooms))
    for room in rooms:
        if not isinstance(room, int) or isinstance(room, bool) or not 0 <= room <= INT64_MAX:
            raise RequestError(
                f"{ROOM_FIELD} must be a number from 0 to {INT64_MAX}, not {excerpt(str(room))}."
            )
    return rooms if isinstance(given, list) else [room + index for index, room in enumerate(rooms)]
