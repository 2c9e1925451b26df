"""Clients of a simulated server: closed and open loops, a benchmark's fixed number of prompts, and
conversations. Deterministic: everything follows from a seed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from setpoint.core.messages import Abort, Submit, TokenEvent, ToLoop
from setpoint.core.request import Ids, Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint_testing.simulated import VOCAB

Lengths = Callable[[np.random.Generator], int]
"""Draws a length."""


def uniform(low: int, high: int) -> Lengths:
    """A uniform distribution from low to high, both included."""
    return lambda rng: int(rng.integers(low, high + 1))


def lognormal(median: float, sigma: float, most: int) -> Lengths:
    return lambda rng: int(min(max(1.0, rng.lognormal(np.log(median), sigma)), most))


def mixed(share: float, first: Lengths, second: Lengths) -> Lengths:
    """Draws from ``first`` with the probability ``share``, else from ``second``."""
    return lambda rng: (first if rng.random() < share else second)(rng)


@dataclass(slots=True, frozen=True)
class Load:
    """What requests look like."""

    prompt: Lengths
    """Tokens of a prompt, after those of the shared prefix."""
    output: Lengths
    """Tokens after which the model ends by itself."""
    max_new_tokens: int
    num_prefixes: int = 0
    """Number of different system prompts; 0: prompts share nothing."""
    prefix_tokens: int = 0
    turns: int = 1
    """Number of requests of a conversation; each repeats everything before it."""
    ignore_eos: bool = False
    patience_s: float | None = None
    """Seconds after which a client gives up if its answer is not complete."""


@dataclass(slots=True, frozen=True)
class Arrivals:
    """When requests are sent: ``users`` at a time, or at ``rate`` per second, or both."""

    users: int = 0
    """Number of clients that send their next request after the answer to the last one."""
    think_s: float = 0.0
    """Mean time of a user between an answer and the next request."""
    ramp_s: float = 0.0
    """Seconds within which the users start."""
    rate: float = 0.0
    """Requests per second that come independently of the answers."""
    bursts: int = 1
    """Requests that come together, at ``rate`` / ``bursts`` times a second."""
    until_s: float = float("inf")
    """After this time no request or conversation begins."""
    total: int | None = None
    """Most requests or conversations that begin."""
    pause: tuple[float, float] = (0.0, 0.0)
    """The beginning and the end of a time in which no request or conversation begins."""


@dataclass(slots=True)
class _Conversation:
    history: Ids
    turns_left: int
    user: bool
    """Whether a user of the closed loop begins another one after it."""


@dataclass(slots=True)
class Traffic:
    """Implements Clients."""

    load: Load
    arrivals: Arrivals
    seed: int
    _heap: list[tuple[float, int, _Conversation | None]] = field(default_factory=list)
    """(time, tie-breaker, the conversation that continues, or None if a request of the open loop
    begins)."""
    _open: dict[int, tuple[_Conversation, float]] = field(default_factory=dict)
    """seq_id -> its conversation, and when it was sent."""
    _outputs: list[int] = field(default_factory=list)
    _aborts: list[tuple[float, int]] = field(default_factory=list)
    _num_begun: int = 0
    _num_events: int = 0
    _rng: np.random.Generator = field(init=False)
    _prefixes: list[Ids] = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._prefixes = [self._ids(self.load.prefix_tokens) for _ in range(self.load.num_prefixes)]
        arrivals = self.arrivals
        for _ in range(arrivals.users):
            self._push(float(self._rng.random()) * arrivals.ramp_s, self._conversation(user=True))
        if arrivals.rate:
            self._push(self._gap(), None)

    def num_outputs(self, seq_id: int) -> int:
        return self._outputs[seq_id]

    def next_at(self) -> float | None:
        return min((each[0][0] for each in (self._heap, self._aborts) if each), default=None)

    def take(self, now: float) -> list[ToLoop]:
        return [*self._submits(now), *self._given_up(now)]

    def ended(self, event: TokenEvent, now: float) -> None:
        conversation, _ = self._open.pop(event.seq_id)
        if conversation.turns_left > 0:
            # The next prompt repeats the number of the outputs, not the outputs themselves.
            more = self._ids(event.num_outputs)
            conversation.history = np.concatenate([conversation.history, more])
        elif conversation.user:
            conversation = self._conversation(user=True)
        else:
            return
        self._push(now + float(self._rng.exponential(self.arrivals.think_s or 1e-9)), conversation)

    def _submits(self, now: float) -> Iterator[Submit]:
        while self._heap and self._heap[0][0] <= now:
            at, _, conversation = heapq.heappop(self._heap)
            if conversation is not None:
                if (submit := self._next(conversation, at)) is not None:
                    yield submit
                continue
            for _ in range(self.arrivals.bursts):
                if (submit := self._next(self._conversation(user=False), at)) is not None:
                    yield submit
            if not self._is_over(at):
                self._push(at + self._gap(), None)

    def _given_up(self, now: float) -> Iterator[Abort]:
        while self._aborts and self._aborts[0][0] <= now:
            _, seq_id = heapq.heappop(self._aborts)
            if seq_id in self._open:
                yield Abort([seq_id])

    def _next(self, conversation: _Conversation, at: float) -> Submit | None:
        """The next request of a conversation; None if it is a new one and no more may begin."""
        load = self.load
        begin, end = self.arrivals.pause
        if begin <= at < end:
            self._push(end + float(self._rng.random()), conversation)
            return None
        if conversation.turns_left == load.turns:
            if self._is_over(at):
                return None
            self._num_begun += 1
        conversation.turns_left -= 1
        new = self._ids(load.prompt(self._rng))
        conversation.history = np.concatenate([conversation.history, new])
        seq_id = len(self._outputs)
        self._outputs.append(max(1, load.output(self._rng)))
        self._open[seq_id] = conversation, at
        if load.patience_s is not None:
            heapq.heappush(self._aborts, (at + load.patience_s, seq_id))
        sampling = SamplingParams(max_new_tokens=load.max_new_tokens, ignore_eos=load.ignore_eos)
        request = Request(
            rid=f"r{seq_id}",
            prompt_ids=pack_ids(conversation.history),
            sampling=sampling,
            seed=seq_id,
        )
        return Submit(seq_id, request)

    def _conversation(self, *, user: bool) -> _Conversation:
        begin = self._ids(0)
        if self._prefixes:
            begin = self._prefixes[int(self._rng.integers(len(self._prefixes)))]
        return _Conversation(begin, self.load.turns, user)

    def _is_over(self, at: float) -> bool:
        arrivals = self.arrivals
        enough = arrivals.total is not None and self._num_begun >= arrivals.total
        return enough or at > arrivals.until_s

    def _gap(self) -> float:
        return float(self._rng.exponential(self.arrivals.bursts / self.arrivals.rate))

    def _ids(self, num_tokens: int) -> Ids:
        return self._rng.integers(1, VOCAB, num_tokens, dtype=np.int32)

    def _push(self, at: float, conversation: _Conversation | None) -> None:
        self._num_events += 1
        heapq.heappush(self._heap, (at, self._num_events, conversation))
