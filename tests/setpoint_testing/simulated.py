"""A simulated engine: the real scheduler and loop over an executor that computes nothing. A cost
model says how long each step takes on a virtual clock, so that minutes of a server under load pass
in a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from setpoint.core.messages import ToFrontend, TokenEvent, Tokens, ToLoop
from setpoint.core.plan import OWN_LENGTH, StepPlan, TokenMasks
from setpoint.core.records import Observer
from setpoint.core.result import EAGER, StepResult, one_each
from setpoint.core.settings import Settings
from setpoint.scheduler.cache.manager import CacheConfig
from setpoint.scheduler.loop import Loop
from setpoint.scheduler.scheduler import Scheduler
from setpoint.scheduler.scheduler_config import RatioConfig, SchedulerConfig

VOCAB = 32000
END_OF_TEXT = 0
"""The token that ends an output; it occurs nowhere else in an output."""


@dataclass(slots=True, frozen=True)
class CostModel:
    """How long a step takes. A step reads every weight once, and computes its tokens: it takes the
    longer of the two times, plus the times below. All are in seconds."""

    weights_s: float
    """Time to read the weights, or the latency of the shortest step if that is longer."""
    token_s: float
    """Time to compute one token."""
    kv_token_s: float
    """Time to read the keys and values of one token of context, for one row."""
    host_s: float = 0.001
    """Time of the host for a step."""
    host_row_s: float = 0.000005
    """Time of the host for a row."""
    eager_s: float = 0.0
    """Additional time of a decode step that does not run as a graph."""

    def seconds(self, num_tokens: int, num_context: int, num_rows: int, *, eager: bool) -> float:
        """The time of a step. num_context: tokens that all its rows together attend to."""
        model = max(self.weights_s, num_tokens * self.token_s) + num_context * self.kv_token_s
        host = self.host_s + num_rows * self.host_row_s
        return model + host + (self.eager_s if eager else 0.0)


class VirtualClock:
    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance_to(self, at: float) -> None:
        self._now = max(self._now, at)


class Clients(Protocol):
    """All clients of a simulated server."""

    def next_at(self) -> float | None:
        """When the next message will be sent; None: not before an answer arrives."""
        ...

    def take(self, now: float) -> list[ToLoop]:
        """The messages that were sent up to this time and not taken yet."""
        ...

    def ended(self, event: TokenEvent, now: float) -> None:
        """Note that a request of these clients has ended."""
        ...


class ClientLink:
    """The loop's link to the clients. While the loop waits for a message, the virtual time
    passes."""

    def __init__(self, clients: Clients, clock: VirtualClock) -> None:
        self._clients = clients
        self._clock = clock

    def receive(self, timeout_s: float) -> list[ToLoop]:
        now = self._clock.now()
        if timeout_s > 0:
            at = self._clients.next_at()
            self._clock.advance_to(now + timeout_s if at is None else min(now + timeout_s, at))
        return self._clients.take(self._clock.now())

    def send(self, message: ToFrontend) -> None:
        for event in message.events if isinstance(message, Tokens) else ():
            if event.finish is not None:
                self._clients.ended(event, self._clock.now())


class SimulatedExecutor:
    """Implements core.executor.Executor: lets the time of each step pass, and ends the output of a
    sequence after as many tokens as ``num_outputs`` says."""

    def __init__(
        self,
        costs: CostModel,
        clock: VirtualClock,
        *,
        num_slots: int,
        num_outputs: Callable[[int], int],
        graph_max_rows: int,
    ) -> None:
        """num_outputs: sequence -> tokens after which it ends, the end token included;
        graph_max_rows: decode steps of more rows run without a graph."""
        self._costs = costs
        self._clock = clock
        self._num_outputs = num_outputs
        self._graph_max_rows = graph_max_rows
        self._lengths = np.zeros(num_slots, np.int64)
        """For each slot, the number of its known tokens."""
        self._last = np.zeros(num_slots, np.int64)
        """For each slot, the length at which the end token comes."""

    def submit(self, plan: StepPlan) -> SimulatedStep:
        for admit in plan.admits:
            self._lengths[admit.slot] = len(admit.ids)
            self._last[admit.slot] = admit.num_prompt + self._num_outputs(admit.seq_id) - 1
        rows = plan.rows
        if not len(rows):
            return SimulatedStep(plan, self._clock, 0.0, np.zeros(0, np.int32), EAGER)
        is_decode = bool((rows.starts == OWN_LENGTH).all())
        eager = not is_decode or len(rows) > self._graph_max_rows
        ends = np.where(rows.starts == OWN_LENGTH, self._lengths[rows.slots], 0)
        context = int(np.where(ends > 0, ends, rows.starts + rows.counts).sum())
        seconds = self._costs.seconds(
            int(rows.counts.sum()), context, len(rows), eager=eager and is_decode
        )
        slots = rows.slots[rows.sampling]
        lengths = self._lengths[slots]
        # A token depends on its sequence and position, so that no two outputs share a prefix.
        tokens = 1 + (rows.seq_ids[rows.sampling] * 7919 + lengths * 104729) % (VOCAB - 1)
        tokens[lengths >= self._last[slots]] = END_OF_TEXT
        self._lengths[slots] += 1
        way = EAGER if eager else "replay"
        return SimulatedStep(plan, self._clock, seconds, tokens.astype(np.int32), way)

    def idle(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Nothing to free."""


class SimulatedStep:
    def __init__(
        self,
        plan: StepPlan,
        clock: VirtualClock,
        seconds: float,
        tokens: np.ndarray[tuple[int], np.dtype[np.int32]],
        way: str,
    ) -> None:
        self._plan = plan
        self._clock = clock
        self._seconds = seconds
        self._tokens = tokens
        self._way = way

    def finish(self, masks: TokenMasks | None) -> None:
        self._clock.advance_to(self._clock.now() + self._seconds)

    def result(self) -> StepResult:
        rows = self._plan.rows
        return StepResult(
            self._plan.step_id,
            rows.seq_ids[rows.sampling],
            self._tokens,
            one_each(len(self._tokens)),
            forward_s=self._seconds,
            way=self._way,
        )


@dataclass(slots=True, frozen=True)
class Engine:
    """What is simulated: the device's costs, and the sizes and settings of the scheduler."""

    costs: CostModel
    pool_tokens: int
    context_len: int
    settings: Settings
    graph_max_rows: int = 256
    page_size: int = 1
    prefix_cache: bool = True
    init_ratio: float = 0.7
    waiting_timeout_s: float | None = None


class Simulation:
    """Drive with :meth:`turn`. ``observer`` gets the engine's records."""

    def __init__(
        self,
        engine: Engine,
        clients: Clients,
        num_outputs: Callable[[int], int],
        observer: Observer,
    ) -> None:
        """num_outputs: sequence -> tokens that it generates unless its request stops it earlier."""
        self.clock = VirtualClock()
        num_slots = engine.settings.max_running_requests
        longest = min(engine.context_len, engine.pool_tokens) - 1
        config = SchedulerConfig(
            num_slots=num_slots,
            max_req_len=longest,
            max_req_input_len=longest - 5,
            vocab_size=VOCAB,
            eos_token_ids=frozenset({END_OF_TEXT}),
            ratio=RatioConfig(init=engine.init_ratio),
            waiting_timeout_s=engine.waiting_timeout_s,
        )
        cache = CacheConfig(
            num_pages=engine.pool_tokens // engine.page_size,
            page_size=engine.page_size,
            enabled=engine.prefix_cache,
        )
        executor = SimulatedExecutor(
            engine.costs,
            self.clock,
            num_slots=num_slots,
            num_outputs=num_outputs,
            graph_max_rows=engine.graph_max_rows,
        )
        self.scheduler = Scheduler(config, engine.settings, cache.empty_cache(), observer=observer)
        self._clients = clients
        self._loop = Loop(
            self.scheduler,
            executor,
            ClientLink(clients, self.clock),
            depth=0,
            clock=self.clock,
            observer=observer,
        )

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way and the clients send nothing more."""
        return self.scheduler.state.is_idle and self._clients.next_at() is None

    def turn(self) -> None:
        self._loop.step()
