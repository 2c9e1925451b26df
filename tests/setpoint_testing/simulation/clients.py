"""The clients of a simulated server: what they ask for, what they got, and what they must get."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.jobs import ClientGoneError, SequenceOutput
from setpoint.frontend.service import Service
from setpoint_testing.simulation.model import FIRST_LETTER, LETTERS
from setpoint_testing.simulation.virtual_time import VirtualLoop

SHARED = 70
"""Length of the beginnings that prompts share: more than a block of ``core.prefix_digest``."""


@dataclass(frozen=True)
class Order:
    """What one client wants, and how it behaves."""

    rid: str
    at: float
    """When it asks, after the start."""
    prompt: tuple[int, ...]
    sampling: SamplingParams
    options: RequestOptions
    poison: tuple[int, int, int] | None = None
    """(which of its sequences, at which output, how) ends the engine that computes it."""
    leaves_after: float | None = None
    """When it closes its connection."""
    is_aborted_after: float | None = None
    """When somebody aborts it by its rid."""
    reads_for: float = 0.0
    """The longest time that it takes to read a piece."""


@dataclass(slots=True)
class Answer:
    """What became of one sequence, as its client saw it."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_outputs: int = 0
    finish: str = ""
    """"" if it did not end."""

    @staticmethod
    def of(output: SequenceOutput) -> Answer:
        finish = output.finish
        return Answer(
            output.text,
            list(output.output_ids),
            output.logprobs.values.tolist(),
            output.num_prompt,
            output.num_outputs,
            "" if finish is None else f"{finish.how} {finish.matched} {finish.length}",
        )

    def continues_as(self, whole: Answer) -> bool:
        """Whether it is the beginning of another. The text of an aborted one may end with the
        beginning of the stop string that would have ended the other, which shows none of it."""
        text = whole.text
        if self.finish.startswith("abort") and whole.finish.startswith("stop "):
            text += whole.finish.removeprefix("stop ").rpartition(" ")[0]
        return (
            text.startswith(self.text)
            and whole.ids[: len(self.ids)] == self.ids
            and whole.logprobs[: len(self.logprobs)] == self.logprobs
            and self.num_outputs <= whole.num_outputs
        )


@dataclass(slots=True)
class Outcome:
    order: Order
    answers: list[Answer] = field(default_factory=list)
    error: Exception | None = None
    last_at: float = 0.0
    """When its last tokens came."""

    @property
    def is_whole(self) -> bool:
        return self.error is None and bool(self.answers) and all(a.finish for a in self.answers)


def draw_orders(rng: random.Random, count: int, *, seconds: float, ranks: int) -> Iterator[Order]:
    """Orders of all kinds, spread over so many seconds."""
    beginnings = [tuple(letters(rng, SHARED)) for _ in range(2)]
    for number in range(count):
        prompt = (rng.choice(beginnings) if rng.random() < 0.4 else ()) + tuple(
            letters(rng, rng.randrange(1, 20))
        )
        poison = None
        n = rng.choice([1, 1, 1, 1, 2, 3])
        if rng.random() < 0.04:
            poison = rng.randrange(n), rng.randrange(6), rng.choice([-9, -11])
        yield Order(
            f"r{number}",
            rng.uniform(0, seconds),
            prompt,
            _sampling(rng, n, 1000 * number),
            RequestOptions(
                stream=rng.random() < 0.8,
                logprobs=LogprobOptions() if rng.random() < 0.25 else None,
                routed_dp_rank=rng.randrange(ranks) if rng.random() < 0.1 else None,
            ),
            poison,
            leaves_after=rng.uniform(0, 1) if rng.random() < 0.08 else None,
            is_aborted_after=rng.uniform(0, 1) if rng.random() < 0.08 else None,
            reads_for=rng.choice([0.0, 0.0, 0.1]),
        )


def letters(rng: random.Random, count: int) -> list[int]:
    return [FIRST_LETTER + rng.randrange(LETTERS) for _ in range(count)]


def _sampling(rng: random.Random, n: int, seed: int) -> SamplingParams:
    kind = rng.random()
    stop: tuple[str, ...] = ()
    if kind < 0.35:
        stop = tuple(
            bytes(letters(rng, rng.randrange(1, 4))).decode() for _ in range(rng.randrange(1, 3))
        )
    is_spelled = 0.35 <= kind < 0.5
    # Together with a grammar such a stop may leave no token to choose.
    stop_ids = (FIRST_LETTER,) if rng.random() < 0.1 and not is_spelled else ()
    return SamplingParams(
        n=n,
        sampling_seed=seed,
        max_new_tokens=rng.randrange(5, 24),
        min_new_tokens=rng.choice([0, 0, 5]),
        stop=stop,
        no_stop_trim=rng.random() < 0.2,
        stop_token_ids=stop_ids,
        ignore_eos=rng.random() < 0.3,
        regex="spelled" if is_spelled else None,
    )


class Clients:
    def __init__(self, loop: VirtualLoop, service: Service, rng: random.Random) -> None:
        self._loop = loop
        self._service = service
        self._rng = rng
        self.outcomes: dict[str, Outcome] = {}

    async def ask(self, order: Order) -> None:
        """Be the client of one order, until its answer has ended."""
        outcome = self.outcomes[order.rid] = Outcome(order)
        try:
            await self._read(order, outcome)
        except (RequestError, EngineDeadError, ClientGoneError) as error:
            outcome.error = error

    async def _read(self, order: Order, outcome: Outcome) -> None:
        service = self._service
        prompt = np.array(order.prompt, np.int32)
        requests = service.answering.intake.requests(
            prompt, order.sampling, order.options, rid=order.rid
        )
        job = service.answering.jobs.make(requests, received={})
        timers = []
        try:
            with job:
                if order.leaves_after is not None:
                    timers.append(self._loop.call_later(order.leaves_after, job.cancel))
                if order.is_aborted_after is not None:
                    abort = service.engine.abort
                    timers.append(self._loop.call_later(order.is_aborted_after, abort, order.rid))
                async for _ in job.pieces():
                    outcome.last_at = self._loop.time()
                    if order.reads_for:
                        await asyncio.sleep(self._rng.uniform(0, order.reads_for))
        finally:
            for timer in timers:
                timer.cancel()
            outcome.answers = [Answer.of(output) for output in job.outputs]
