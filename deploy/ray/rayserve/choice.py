"""Chooses the replica of a request, with the rule for the engines of one server (``ipc.balance``).
It knows the names of the replicas, what their caches hold, and what was sent to them, but nothing
of Ray."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from rayserve.prompts import Prompt
from setpoint.core.messages import Cached
from setpoint.core.prefix_digest import names_of
from setpoint.core.request import Request, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.ipc.balance import CacheAware, EngineLoad

FRESH_S = 5.0
"""Seconds for which the prefixes of an ended request count as cached although no report contains
them: a report may be older than the end of the request."""
NOTHING = (b"\0\0\0\0", "")
"""Stands for a request without a prompt, which costs almost nothing on any replica."""


class Choice:
    """The replicas and their loads, as one router sees them. It counts the requests that it has
    sent."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._rule = CacheAware()
        self._loads: dict[str, EngineLoad] = {}
        self._held: dict[str, bytes] = {}
        """The last report of each replica about its cache."""
        self._sent: dict[str, tuple[str, list[Request]]] = {}
        """Id of an open request -> its replica and its prompts."""
        self._left: dict[str, deque[tuple[float, bytes]]] = {}
        """Replica -> the prompts of its ended requests, each with the time of the end; some are
        outdated."""
        self._num_known = 0

    def know(self, held: dict[str, bytes]) -> None:
        """Set the replicas that exist, and the hashes of the prefixes that their caches hold.
        Forgets everything about other replicas."""
        for name in self._loads.keys() - held.keys():
            del self._loads[name], self._held[name], self._left[name]
            for request in [key for key, (where, _) in self._sent.items() if where == name]:
                del self._sent[request]
        for name, hashes in held.items():
            if name not in self._loads:
                self._loads[name] = EngineLoad(self._num_known, keeps_prefixes=True)
                self._left[name] = deque()
                self._num_known += 1
            if self._held.get(name) != hashes:
                self._held[name] = hashes
                self._loads[name].take(Cached(hashes, b"", is_cleared=True))
                left = self._left[name]
                while left and left[0][0] < self._now() - FRESH_S:
                    left.popleft()
                for _, stored in left:
                    self._loads[name].take(Cached(stored, b""))

    def order(self, prompts: Sequence[Prompt]) -> list[str]:
        """The replicas, the best one first. For a body with several prompts, the first prompt
        decides."""
        first = _request((prompts or [NOTHING])[0])
        left, order = dict(self._loads), []
        while left:
            names = list(left)
            order.append(names[self._rule.choose(list(left.values()), first)])
            del left[order[-1]]
        return order

    def sent(self, request_id: str, name: str, prompts: Sequence[Prompt]) -> None:
        """Note that a request goes to a replica; it counts there until ``done``. A second call for
        the same request moves it."""
        self._remove(request_id)
        if name in self._loads:
            requests = [_request(prompt) for prompt in prompts]
            self._sent[request_id] = name, requests
            for each in requests:
                self._loads[name].add(each)

    def done(self, request_id: str) -> None:
        """Note that a request has ended. Does nothing for a request that is not open."""
        name, requests = self._remove(request_id)
        for each in requests:
            stored = b"".join(names_of(each.with_digests().digests))
            self._left[name].append((self._now(), stored))
            self._loads[name].take(Cached(stored, b""))

    def cancelled(self, request_id: str) -> None:
        """Note that a request was not sent to any replica."""
        self._remove(request_id)

    def _remove(self, request_id: str) -> tuple[str, list[Request]]:
        name, requests = self._sent.pop(request_id, ("", []))
        for each in requests:
            self._loads[name].remove(each)
        return name, requests

    def num_open(self, name: str) -> int:
        """Number of open sequences that were sent to a replica."""
        return self._loads[name].num_requests


def _request(prompt: Prompt) -> Request:
    ids, namespace = prompt
    return Request(
        rid="",
        prompt_ids=ids,
        sampling=SamplingParams(),
        seed=0,
        options=RequestOptions(namespace=namespace),
    )
