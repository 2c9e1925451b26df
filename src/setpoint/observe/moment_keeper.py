"""Sums up an engine's records in moments of about a second, at the cost of a few additions per
record, and keeps a bounded number of finished moments.

Moments follow one another without gaps. A moment ends at the loop's first turn that is at least a
second after its beginning, so a moment with a long step is longer. A time without steps is one
moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from setpoint.core.control import Moments, Totals
from setpoint.core.moments import Moment, quantile
from setpoint.core.pool import PoolStats
from setpoint.core.records import (
    Continued,
    GrammarLate,
    Paused,
    PreparationEnded,
    PreparationStarted,
    Record,
    RequestAdmitted,
    RequestDone,
    Rested,
    Retraction,
    StepDone,
    Turn,
    TurnDone,
)
from setpoint.core.result import EAGER
from setpoint.observe.figures import count_end, count_step

KEPT = 600
"""Largest number of finished moments to keep: ten minutes of a busy engine."""
MOMENT_S = 1.0
"""Shortest length of a moment in seconds. A time without steps that lasts as long is a moment of
its own."""


class MomentKeeper:
    def __init__(self, *, epoch: float = 0.0, kept: int | None = KEPT) -> None:
        """epoch: when the engine's clock showed 0, in seconds since 1970. kept: largest number of
        finished moments to keep; None keeps all."""
        self._epoch = epoch
        self._finished: deque[Moment] = deque(maxlen=kept)
        self._next = 0
        """Number of the next moment to be finished; the first one had 0."""
        self._began = 0.0
        """When the present moment began, in clock seconds, like the times below."""
        self._due = float("-inf")
        """When the present moment can end; -inf before the first turn."""
        self._turn_at = 0.0
        self._rests_from = 0.0
        """When the latest step was done."""
        self._sums = _Sums()
        self._present = _Present()
        self._takes: dict[type[Record], Callable[[Any], None]] = {
            Turn: self._turn,
            StepDone: self._step,
            TurnDone: self._turn_done,
            RequestAdmitted: lambda admitted: self._sums.waits.append(admitted.waited_s),
            RequestDone: lambda done: count_end(self._sums.totals, done),
            Retraction: lambda retraction: self._sums.retraction(retraction),
            PreparationStarted: lambda record: self._present.prepare(1),
            GrammarLate: lambda record: self._present.prepare(1),
            PreparationEnded: lambda record: self._present.prepare(-1),
            Paused: lambda pause: self._present.hold(pause.num_running, pause.num_queued),
            Continued: lambda record: self._present.hold(0, 0),
            Rested: self._rest,
        }

    def on(self, record: Record) -> None:
        # By type, because most records of a step are of no interest here.
        take = self._takes.get(type(record))
        if take is not None:
            take(record)

    def since(self, number: int) -> Moments:
        """The kept moments from this number on."""
        finished = self._finished
        first = max(number, self._next - len(finished))
        return Moments(first, [finished[index - self._next] for index in range(first, self._next)])

    def finish(self) -> None:
        """Finish the present moment after the last record."""
        if self._sums.num_steps:
            self._end(max(self._rests_from, self._turn_at))

    def _turn(self, turn: Turn) -> None:
        self._turn_at = turn.at
        if turn.at >= self._due:
            self._advance(turn.at)

    def _step(self, step: StepDone) -> None:
        self._sums.step(step, before=self._present.pool)
        self._rests_from = step.finished_at
        self._present.pool = step.pool

    def _rest(self, rest: Rested) -> None:
        self._present.pool = rest.pool

    def _turn_done(self, turn: TurnDone) -> None:
        self._sums.turn(turn)
        self._rests_from = max(self._rests_from, self._turn_at + turn.turn_s)

    def _advance(self, at: float) -> None:
        if self._due > float("-inf"):
            rests_from = max(self._rests_from, self._due)
            if self._sums.num_steps and at - rests_from >= MOMENT_S:
                self._end(rests_from)
            self._end(at)
        self._began, self._due = at, at + MOMENT_S

    def _end(self, at: float) -> None:
        seconds = at - self._began
        self._finished.append(self._sums.moment(self._epoch + self._began, seconds, self._present))
        self._next += 1
        self._began = at
        self._sums = _Sums()


class _Present:
    """The state of an engine that runs no steps: it is paused or waits for requests."""

    def __init__(self) -> None:
        self.running = self.queue = self.preparing = 0
        self.pool: PoolStats | None = None
        """The pool after the latest step, or when the engine came to rest."""

    def hold(self, running: int, queue: int) -> None:
        self.running, self.queue = running, queue

    def prepare(self, change: int) -> None:
        self.preparing += change


class _Sums:
    """Sums over the present moment; ``moment`` makes the means."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.num_prefill = self.num_decode = 0
        self.running = self.running_max = 0
        self.queue = self.queue_max = 0
        self.queue_min: int | None = None
        self.preparing = self.pending_tokens = 0
        self.pool: PoolStats | None = None
        """While the latest step ran."""
        self.usage = self.usage_max = 0.0
        self.tokens = 0
        self.new_seqs = self.largest_prefill = 0
        self.graph_hits = self.graph_misses = self.missed_running = 0
        self.ratio = 0.0
        self.busy_s = self.model_s = 0.0
        self.cpu_s: float | None = None
        self.waits: list[float] = []
        """Seconds in the queue before each admission."""
        self.retractions = 0
        self.ratio_before = self.ratio_after = 0.0
        """The new-token ratio before and after the latest retraction."""

    @property
    def num_steps(self) -> int:
        return self.num_prefill + self.num_decode

    def step(self, step: StepDone, *, before: PoolStats | None) -> None:
        """before: the pool after the previous step. A record has the pool after its step, when
        the sequences that ended in it have given back what they held while it ran."""
        count_step(self.totals, step)
        ended = before is not None and before.used > step.pool.used
        self.pool = before if ended else step.pool
        running, queue = step.num_running, step.num_queued
        if step.num_prefill_rows:
            self.num_prefill += 1
            self.new_seqs += step.num_new_seqs
            self.largest_prefill = max(self.largest_prefill, step.num_new_tokens)
        else:
            self.num_decode += 1
            if step.way == EAGER:
                self.graph_misses += 1
                self.missed_running += running
            else:
                self.graph_hits += 1
        self.running += running
        self.queue += queue
        if running > self.running_max:
            self.running_max = running
        if queue > self.queue_max:
            self.queue_max = queue
        if self.queue_min is None or queue < self.queue_min:
            self.queue_min = queue
        self.preparing += step.num_preparing
        self.pending_tokens += step.num_pending_tokens
        used = step.pool.used
        self.tokens += used
        usage = step.pool.usage
        self.usage += usage
        if usage > self.usage_max:
            self.usage_max = usage
        self.ratio += step.new_token_ratio

    def turn(self, turn: TurnDone) -> None:
        self.busy_s += turn.turn_s
        self.model_s += turn.model_s
        if turn.cpu_s is not None:
            self.cpu_s = (self.cpu_s or 0.0) + turn.cpu_s

    def retraction(self, retraction: Retraction) -> None:
        self.retractions += 1
        self.totals.retracted += retraction.num_seqs
        self.ratio_before, self.ratio_after = retraction.ratio_before, retraction.ratio_after

    def moment(self, at: float, seconds: float, present: _Present) -> Moment:
        pool, totals = self.pool or present.pool, self.totals
        moment = Moment(
            at=at,
            seconds=seconds,
            ended=totals.ended,
            pool={} if pool is None else msgspec.structs.asdict(pool),
            busy_s=self.busy_s,
            model_s=self.model_s,
            cpu_s=self.cpu_s,
            output_tokens=totals.output_tokens,
            retractions=self.retractions,
            retracted=totals.retracted,
        )
        if self.retractions:
            moment.other = {"ratio_before": self.ratio_before, "ratio_after": self.ratio_after}
        if self.waits:
            self.waits.sort()
            moment.quantiles = {
                f"wait_p{share}": quantile(self.waits, share / 100) for share in (50, 95)
            }
        if self.num_steps:
            self._fill(moment)
            return moment
        moment.running = moment.running_max = float(present.running)
        moment.queue = moment.queue_min = moment.queue_max = float(present.queue)
        moment.preparing = float(present.preparing)
        if pool is not None:
            moment.usage = moment.usage_max = pool.usage
            moment.tokens = float(pool.used)
        moment.gen_throughput = moment.input_throughput = 0.0
        return moment

    def _fill(self, moment: Moment) -> None:
        """Set the steps' means, largest values and sums. There must be a step."""
        steps, seconds, totals = self.num_steps, max(moment.seconds, 1e-9), self.totals
        moment.num_prefill, moment.num_decode = self.num_prefill, self.num_decode
        moment.running, moment.running_max = self.running / steps, float(self.running_max)
        moment.queue, moment.queue_max = self.queue / steps, float(self.queue_max)
        moment.queue_min = float(self.queue_min or 0)
        moment.preparing = self.preparing / steps
        moment.pending_tokens = self.pending_tokens / steps
        moment.usage, moment.usage_max = self.usage / steps, self.usage_max
        moment.tokens = self.tokens / steps
        moment.gen_throughput = totals.output_tokens / seconds
        moment.input_throughput = totals.prompt_tokens / seconds
        moment.new_seqs, moment.new_tokens = self.new_seqs, totals.prompt_tokens
        moment.cached_tokens, moment.largest_prefill = totals.cached_tokens, self.largest_prefill
        moment.graph_hits, moment.graph_misses = self.graph_hits, self.graph_misses
        if self.graph_misses:
            moment.missed_running = self.missed_running / self.graph_misses
        moment.new_token_ratio = self.ratio / steps
        moment.refusals = totals.refusals
