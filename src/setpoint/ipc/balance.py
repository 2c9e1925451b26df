"""Chooses the engine for a request (--load-balance-method): pure rules over what the frontend knows
of each engine.

The names and the rules of SGLang's methods are those of its data-parallel controller. SGLang counts
from snapshots that the engines send; here the frontend has sent every request itself, so its counts
are never late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from setpoint.core.request import Request


@dataclass(slots=True)
class Load:
    """What one engine has to do; written by the EngineClient alone."""

    rank: int
    num_requests: int = 0
    """Its open requests."""
    num_tokens: int = 0
    """Their prompts, and the outputs that they had when they were sent."""

    def add(self, request: Request) -> None:
        self.num_requests += 1
        self.num_tokens += _num_tokens(request)

    def remove(self, request: Request) -> None:
        self.num_requests -= 1
        self.num_tokens -= _num_tokens(request)


def _num_tokens(request: Request) -> int:
    return (len(request.prompt_ids) + len(request.prior_output_ids)) // 4


def _least(costs: Sequence[tuple[int, int]]) -> int:
    return min(range(len(costs)), key=costs.__getitem__)


class Balance(Protocol):
    def choose(self, loads: Sequence[Load], request: Request) -> int:
        """The index of the load to which the request is to be added; ``loads`` is never empty."""
        ...


def make_balance(method: str) -> Balance:
    """The rule of a --load-balance-method."""
    return METHODS[method]()


class RoundRobin:
    """Each rank in turn; a rank that is not ready is passed over."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, loads: Sequence[Load], request: Request) -> int:
        after = [index for index, load in enumerate(loads) if load.rank > self._last]
        index = after[0] if after else 0
        self._last = loads[index].rank
        return index


class TotalRequests:
    """The engine with the fewest open requests; among equals, the one with the fewest tokens."""

    def choose(self, loads: Sequence[Load], request: Request) -> int:
        return _least([(load.num_requests, load.num_tokens) for load in loads])


class TotalTokens:
    """The engine with the fewest tokens; among equals, the one with the fewest requests."""

    def choose(self, loads: Sequence[Load], request: Request) -> int:
        return _least([(load.num_tokens, load.num_requests) for load in loads])


METHODS: dict[str, Callable[[], Balance]] = {
    "auto": TotalRequests,
    "round_robin": RoundRobin,
    "total_requests": TotalRequests,
    "total_tokens": TotalTokens,
}
