"""Chooses the engine for a request (--load-balance-method), with pure rules over what the frontend
knows about each engine.

The names and the rules of SGLang's methods are those of its data-parallel controller. SGLang counts
from snapshots that the engines send; here the frontend has sent every request itself, so its counts
are never late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from setpoint.core.messages import Cached
from setpoint.core.prefix_digest import BLOCK_TOKENS, NAME_BYTES, names_of
from setpoint.core.request import Request

REQUEST_TOKENS = 64
"""The number of uncached prompt tokens that cost as much as one more request on the same engine
(``CacheAware``)."""


@dataclass(slots=True)
class EngineLoad:
    """The work of one engine, and the content of its cache. Only the EngineClient changes it."""

    rank: int
    keeps_prefixes: bool = False
    """Whether the prefixes of open requests are counted, too."""
    num_requests: int = 0
    """Number of its open requests."""
    num_tokens: int = 0
    """Tokens of their prompts, and of the outputs that they had when they were sent."""

    _held: set[bytes] = field(default_factory=set)
    """Names of the prefixes that its cache holds, as the engine reports them."""
    _coming: Counter[bytes] = field(default_factory=Counter)
    """Prefixes of its open requests, which the cache will hold before another request can use
    them."""

    def add(self, request: Request) -> None:
        self.num_requests += 1
        self.num_tokens += _num_tokens(request)
        if self.keeps_prefixes:
            self._coming.update(_prefixes_of(request))

    def remove(self, request: Request) -> None:
        self.num_requests -= 1
        self.num_tokens -= _num_tokens(request)
        for name in _prefixes_of(request) if self.keeps_prefixes else ():
            self._coming[name] -= 1
            if not self._coming[name]:
                del self._coming[name]

    @property
    def held(self) -> bytes:
        """Names of the prefixes that its cache holds."""
        return b"".join(self._held)

    @property
    def num_held(self) -> int:
        """Number of these prefixes, including those that it will hold."""
        return len(self._held) + len(self._coming)

    def take(self, news: Cached) -> None:
        """Apply a change of the cache."""
        if news.is_cleared:
            self._held.clear()
        self._held.difference_update(_split(news.removed))
        self._held.update(_split(news.stored))

    def num_cached(self, prefixes: Sequence[bytes]) -> int:
        """Number of tokens of a prompt with these prefixes that need not be computed."""
        # A cache that holds a prefix also holds all shorter ones.
        shorter, longer = 0, len(prefixes)
        while shorter < longer:
            middle = (shorter + longer) // 2
            name = prefixes[middle]
            if name in self._held or name in self._coming:
                shorter = middle + 1
            else:
                longer = middle
        return shorter * BLOCK_TOKENS


def _split(names: bytes) -> list[bytes]:
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def _prefixes_of(request: Request) -> Sequence[bytes]:
    return names_of(request.with_digests().digests)


def _num_tokens(request: Request) -> int:
    return (len(request.prompt_ids) + len(request.prior_output_ids)) // 4


def _least(costs: Sequence[tuple[int, ...]]) -> int:
    return min(range(len(costs)), key=costs.__getitem__)


class Balance(Protocol):
    uses_prefixes: ClassVar[bool]
    """Whether it uses ``EngineLoad.num_cached``."""

    def choose(self, loads: Sequence[EngineLoad], request: Request) -> int:
        """The index of the load to which the request is to be added; ``loads`` is never empty."""
        ...


def make_balance(method: str) -> Balance:
    """The rule for a --load-balance-method."""
    return METHODS[method]()


class RoundRobin:
    """Chooses each rank in turn, and skips ranks that are not ready."""

    uses_prefixes: ClassVar[bool] = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, loads: Sequence[EngineLoad], request: Request) -> int:
        after = [index for index, load in enumerate(loads) if load.rank > self._last]
        index = after[0] if after else 0
        self._last = loads[index].rank
        return index


class TotalRequests:
    """Chooses the engine with the fewest open requests; among equals, the one with the fewest
    tokens."""

    uses_prefixes: ClassVar[bool] = False

    def choose(self, loads: Sequence[EngineLoad], request: Request) -> int:
        return _least([(load.num_requests, load.num_tokens) for load in loads])


class TotalTokens:
    """Chooses the engine with the fewest tokens; among equals, the one with the fewest requests."""

    uses_prefixes: ClassVar[bool] = False

    def choose(self, loads: Sequence[EngineLoad], request: Request) -> int:
        return _least([(load.num_tokens, load.num_requests) for load in loads])


class CacheAware:
    """Chooses the engine on which the request costs least. The cost is the number of prompt tokens
    that the engine's cache does not hold, plus REQUEST_TOKENS for each of its open requests. So
    requests with the same beginning stay together until the engine has so much more to do than
    another that computing the prompt again there is cheaper. Among equals it chooses the engine
    with the fewest tokens, and then the one whose cache holds less; otherwise requests that come
    one by one would all go to one engine."""

    uses_prefixes: ClassVar[bool] = True

    def choose(self, loads: Sequence[EngineLoad], request: Request) -> int:
        num_tokens, prefixes = _num_tokens(request), _prefixes_of(request)
        costs = []
        for load in loads:
            missing = num_tokens - load.num_cached(prefixes)
            cost = missing + REQUEST_TOKENS * load.num_requests
            costs.append((cost, load.num_tokens, load.num_held))
        return _least(costs)


# frontend/routing.py converts a room to a rank before a request comes here. This rule applies when
# that rank is not ready, and to the server's own requests.
METHODS: dict[str, Callable[[], Balance]] = {
    "auto": CacheAware,
    "cache_aware": CacheAware,
    "follow_bootstrap_room": TotalRequests,
    "round_robin": RoundRobin,
    "total_requests": TotalRequests,
    "total_tokens": TotalTokens,
}
