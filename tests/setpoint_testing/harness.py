"""A scheduler with a scripted (or a real) executor and a link driven by hand, so that tests of
scheduling run step by step and take milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar

import msgspec
import numpy as np

from setpoint.core.control import Change, Continue, Operate, OptionChange, Pause, PauseMode
from setpoint.core.executor import Executor
from setpoint.core.handover import Giver, Taker
from setpoint.core.messages import Abort, Finish, Reply, Stop, Submit, ToFrontend, Tokens, ToLoop
from setpoint.core.operations import Operation, Operator
from setpoint.core.pagerows import CacheCosts, PageRow
from setpoint.core.plan import StepPlan
from setpoint.core.records import Preemption, Record, Retraction, StepDone
from setpoint.core.request import Ids, Request, RequestOptions, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.core.settings import Settings
from setpoint.scheduler import invariants
from setpoint.scheduler.cache.manager import CacheConfig
from setpoint.scheduler.loop import Loop
from setpoint.scheduler.scheduler import Scheduler
from setpoint.scheduler.scheduler_config import SchedulerConfig
from setpoint.scheduler.sequence import MAX_FORCED, Sequence
from setpoint_testing.movers import Key, ScriptedMover
from setpoint_testing.preparers import ScriptedPreparer, nothing_to_prepare
from setpoint_testing.scripted import NextToken, NumTokens, ScriptedExecutor, hashed_token

VOCAB = 97
TURN_S = 0.003
"""Seconds of a turn on the harness's clock."""


class ManualClock:
    """A clock that advances by a microsecond each time it is read, and by :meth:`advance`."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 1e-6
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


R = TypeVar("R")


class Recorder:
    """An Observer that keeps everything."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def on(self, record: Record) -> None:
        self.records.append(record)

    def of(self, kind: type[R]) -> list[R]:
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def steps(self) -> list[StepDone]:
        return self.of(StepDone)

    @property
    def retractions(self) -> list[Retraction]:
        return self.of(Retraction)

    @property
    def preemptions(self) -> list[Preemption]:
        return self.of(Preemption)


@dataclass
class Wire:
    """The link of a loop under test: the loop receives in its next turn what the test posts."""

    inbox: list[ToLoop] = field(default_factory=list)
    outbox: list[ToFrontend] = field(default_factory=list)

    def post(self, message: ToLoop) -> None:
        self.inbox.append(message)

    def receive(self, timeout_s: float) -> list[ToLoop]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: ToFrontend) -> None:
        self.outbox.append(message)


@dataclass
class Outcome:
    """What a client of the harness saw of one request."""

    ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    num_cached: int = 0
    num_loaded: int = 0
    num_retractions: int = 0
    num_events: int = 0
    embedding: bytes = b""
    hidden_states: list[float] = field(default_factory=list)
    """All numbers in one list, in order of arrival."""
    logprob_ids: list[int] = field(default_factory=list)
    """The token of each output position whose logprob arrived."""
    top_logprobs: list[list[float]] = field(default_factory=list)
    """The top logprobs of each output position, if the request asked for them."""


class Sizes(TypedDict):
    """The sizes of a cache."""

    num_pages: int
    page_size: int
    row: PageRow


class Harness:
    """Drive with :meth:`submit`, :meth:`turn`, :meth:`drain`; invariants are checked after every
    turn."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 1,
        row: PageRow | None = None,
        cache_enabled: bool = True,
        eviction_policy: str = "lru",
        eviction_parameters: Mapping[str, int] | None = None,
        next_token: NextToken | None = None,
        num_tokens: NumTokens = lambda most: most,
        preparer: ScriptedPreparer | None = None,
        executor: Executor | None = None,
        wire: Wire | None = None,
        operator: Operator | None = None,
        handover: Mapping[str, Giver | Taker] | None = None,
        stored: dict[Key, np.ndarray] | None = None,
        **config: Any,
    ) -> None:
        """handover: the giver or the taker. row: the model's cache groups. num_tokens: how many of
        the tokens that a row may yield it does yield. executor: replaces the scripted one. wire: replaces the one that only keeps
        messages. stored: what cache tiers hold (``mover``), for a config with ``tiers``. config:
        fields of SchedulerConfig and of Settings."""
        sizes = Sizes(num_pages=num_pages, page_size=page_size, row=row or PageRow())
        self.config, self.settings = _rules(_longest(sizes, config), config)
        self._wanted = self.settings
        self.recorder = Recorder()
        self.clock = ManualClock()
        self.wire = wire or Wire()
        self.cache_config = CacheConfig(
            **sizes,
            enabled=cache_enabled,
            eviction_policy=eviction_policy,
            eviction_parameters=dict(eviction_parameters or {}),
        )
        self.cache = self.cache_config.empty_cache()
        self.executor = executor or ScriptedExecutor(
            **sizes, next_token=next_token or hashed_token(VOCAB), num_tokens=num_tokens
        )
        self.preparer = preparer or nothing_to_prepare()
        self.preparer.post = self.wire.post
        self.preparer.vocab_size = self.config.vocab_size
        self.mover = self._mover(stored)
        self.scheduler = self._scheduler(handover or {})
        self.loop = Loop(
            self.scheduler,
            self.executor,
            self.wire,
            depth=self.config.depth,
            clock=self.clock,
            observer=self.recorder,
            operator=operator,
        )
        self._num_operations = 0
        self._rids: list[str] = []
        """The ids of all submitted requests: a sequence's number is its place in this list."""
        self.outcomes: dict[str, Outcome] = {}
        self.replies: list[Reply] = []

    def _scheduler(self, handover: Mapping[str, Giver | Taker]) -> Scheduler:
        return Scheduler(
            self.config,
            self.settings,
            self.cache,
            observer=self.recorder,
            preparer=self.preparer,
            mover=self.mover,
            **handover,  # type: ignore[arg-type]
        )

    def _mover(self, stored: dict[Key, np.ndarray] | None) -> ScriptedMover | None:
        if self.config.tiers is None:
            return None
        assert isinstance(self.executor, ScriptedExecutor)
        return ScriptedMover(
            self.executor,
            self.config.tiers.block,
            self.cache.page_size,
            self.cache.row.width,
            stored={} if stored is None else stored,
            post=self.wire.post,
        )

    def submit(
        self,
        rid: str,
        prompt: Iterable[int],
        *,
        prior: Iterable[int] = (),
        stream: bool = True,
        **options: Any,
    ) -> None:
        """Post a request; keyword options go to Request or RequestOptions if it has such a field,
        else to SamplingParams."""
        own = _taken(options, Request)
        asked = RequestOptions(stream=stream, **_taken(options, RequestOptions))
        sampling = SamplingParams(**{"max_new_tokens": 4, **options})
        seq_id = len(self._rids)
        own.setdefault("seed", seq_id)
        request = Request(
            rid=rid,
            prompt_ids=pack_ids(ids_of(prompt)),
            prior_output_ids=pack_ids(ids_of(prior)),
            sampling=sampling,
            options=asked,
            **own,
        )
        self.outcomes[rid] = Outcome()
        self._rids.append(rid)
        self.wire.inbox.append(Submit(seq_id, request))

    def abort(self, *rids: str) -> None:
        """Post an Abort of the latest requests with these rids."""
        self.wire.inbox.append(Abort([self.seq_id(rid) for rid in rids]))

    def stop(self, rid: str) -> None:
        """Post a Stop of the latest request with this rid."""
        self.wire.inbox.append(Stop(self.seq_id(rid)))

    def change(self, **settings: Any) -> None:
        """Post a Change of these fields of Settings."""
        self._wanted = msgspec.structs.replace(self._wanted, **settings)
        options = [OptionChange(name, None, str(value)) for name, value in settings.items()]
        self.wire.inbox.append(Change(0, self._wanted, options, "test", ""))

    def pause(self, mode: PauseMode) -> None:
        """Post a Pause."""
        self.wire.inbox.append(Pause(0, mode))

    def resume(self) -> None:
        """Post a Continue."""
        self.wire.inbox.append(Continue(0))

    def operate(self, operation: Operation) -> None:
        """Post an operation with a new number."""
        self._num_operations += 1
        self.wire.inbox.append(Operate(self._num_operations, operation))

    def seq_id(self, rid: str) -> int:
        """The sequence number of the latest request with this rid."""
        return max(seq_id for seq_id, own in enumerate(self._rids) if own == rid)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.advance(TURN_S)
            self.loop.step()
            found = invariants.violations(self.scheduler.state)
            assert not found, found
            self._collect()

    def drain(self, *, max_turns: int = 10_000) -> None:
        """Turn until the engine is idle. Raises AssertionError after ``max_turns`` (a request never
        ends)."""
        for _ in range(max_turns):
            self.turn()
            state = self.scheduler.state
            waits = state.preparing or state.handing or state.transfers
            if state.is_idle and not waits and not self.wire.inbox:
                return
        raise AssertionError(f"not idle after {max_turns} turns")

    def _collect(self) -> None:
        messages, self.wire.outbox = self.wire.outbox, []
        for message in messages:
            if isinstance(message, Reply):
                self.replies.append(message)
            for event in message.events if isinstance(message, Tokens) else ():
                rid = self._rids[event.seq_id]
                outcome = self.outcomes[rid]
                assert outcome.finish is None, f"{rid} got an event after its end"
                outcome.ids += event.ids
                outcome.finish = event.finish
                outcome.num_cached, outcome.num_loaded = event.num_cached, event.num_loaded
                outcome.num_retractions = event.num_retractions
                outcome.num_events += 1
                outcome.embedding = event.embedding
                outcome.hidden_states += np.frombuffer(event.hidden_states, "<f4").tolist()
                if event.output_logprobs is not None:
                    outcome.logprob_ids += event.output_logprobs.ids
                    outcome.top_logprobs += event.output_logprobs.top_values

    # ------------------------------------------------------------------ looking inside

    @property
    def plans(self) -> list[StepPlan]:
        return self.executor.plans

    def sequence(self, rid: str) -> Sequence:
        return self.scheduler.state.by_id[self.seq_id(rid)]

    def running(self) -> list[str]:
        return [seq.rid for seq in self.scheduler.state.running.values()]

    def waiting(self) -> list[str]:
        return [seq.rid for seq in self.scheduler.state.queue]

    def rows(self, index: int = -1) -> list[tuple[int, int, int, bool]]:
        """A plan's rows as (seq_id, start, count, samples)."""
        rows = self.plans[index].rows
        return list(
            zip(
                rows.seq_ids.tolist(),
                rows.starts.tolist(),
                rows.counts.tolist(),
                rows.samples.tolist(),
                strict=True,
            )
        )


def _rules(longest: int, given: dict[str, Any]) -> tuple[SchedulerConfig, Settings]:
    """The fixed and the changeable settings of a harness that is given these fields of both."""
    values: dict[str, Any] = {
        "max_running_requests": 8,
        "max_req_len": longest - 1,
        "max_req_input_len": longest - 6,
        "vocab_size": VOCAB,
        "chunked_prefill_size": None,
    } | given
    values.setdefault("num_slots", values["max_running_requests"])
    live = {name: values.pop(name) for name in Settings.__struct_fields__ if name in values}
    return SchedulerConfig(**values), Settings(**live)


def _longest(sizes: Sizes, config: Mapping[str, Any]) -> int:
    """The number of tokens of the longest sequence that can finish if it runs alone."""
    pool_tokens = sizes["num_pages"] * sizes["page_size"]
    per_row = max(config.get("max_tokens_per_row", 1), 1 + MAX_FORCED)
    in_flight = (config.get("depth", 0) + 1) * per_row
    span = max(config.get("chunked_prefill_size") or pool_tokens, in_flight)
    return CacheCosts(sizes["row"], sizes["page_size"], span).longest(pool_tokens)


def ids_of(tokens: Iterable[int]) -> Ids:
    return np.array(list(tokens), np.int32)


def _taken(options: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Remove from ``options`` those that are fields of ``kind``; returns them."""
    return {key: options.pop(key) for key in kind.__struct_fields__ if key in options}
