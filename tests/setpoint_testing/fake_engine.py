"""An EngineLink that answers from a script, in the test's own event loop, so that the HTTP surface
is tested without a model or a process.

Every message still crosses as encoded bytes. Generates one token per loop turn and sequence; knows
nothing of text.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from setpoint.core.control import (
    Answer,
    CacheFlush,
    Call,
    Change,
    Continue,
    Done,
    EngineFacts,
    EngineFigures,
    EngineReport,
    ExpertLoads,
    FlushCache,
    GetMoments,
    GetState,
    Hold,
    InternalState,
    ListRequests,
    MemoryUsage,
    MetricsReport,
    Moments,
    Operate,
    OperationDone,
    Pause,
    PauseDone,
    PauseMode,
    Refused,
    RequestList,
    TierState,
)
from setpoint.core.errors import ConfigError
from setpoint.core.messages import (
    Abort,
    Finish,
    LogprobBlock,
    Ready,
    Reply,
    Shutdown,
    Stop,
    Submit,
    Timing,
    ToFrontend,
    TokenEvent,
    Tokens,
    decode_to_engine,
    encode,
)
from setpoint.core.moments import Moment
from setpoint.core.operations import MemoryPart, Operation
from setpoint.core.pool import PoolStats
from setpoint.core.request import Request, pack_ids
from setpoint.core.settings import Settings
from setpoint.frontend.live_options import FrontendSettings, Proposal

EMBEDDING_SIZE = 4
SOME_FACTS = EngineFacts(max_total_num_tokens=1000, max_running_requests=8, max_req_input_len=256)
"""The facts of an engine for tests in which they do not matter."""

Script = Callable[[Request], Sequence[int]]


def echo(request: Request) -> Sequence[int]:
    return [int(token) for token in request.prompt()]


@dataclass(slots=True)
class _Running:
    seq_id: int
    request: Request
    script: Sequence[int]
    num_sent: int = 0
    abort: Finish | None = None


@dataclass(slots=True)
class FakeEngine:
    script: Script = echo
    """The ids that a request generates, before limits and stop ids apply; after the last one they
    begin again."""
    eos_ids: frozenset[int] = frozenset()
    context_len: int = 256
    step_s: float = 0.0
    tokens_per_event: int = 1
    num_cached: int = 0
    max_running: int = 1000
    """Most sequences that run at once; others wait, as in an engine without room."""
    refuse: Callable[[Request], Finish | None] = lambda request: None
    """The abort with which a request is answered, e.g. "queue full"; None: it runs."""
    metrics: MetricsReport = field(default_factory=MetricsReport)
    """The engine's part of ``/metrics``."""
    moments: list[Moment] = field(default_factory=list)
    """The answer to GetMoments."""
    num_asked: int = 0
    """Number of these calls so far."""
    loads: bool = False
    """Whether it is loading when it starts: it is not ready before ``loaded`` is called."""
    mute: bool = False
    """While set, the engine answers no call."""
    silent: bool = False
    """While set, the engine accepts everything and sends nothing."""
    paused: PauseMode | None = None
    """The mode of the pause in force."""
    operations: list[Operation] = field(default_factory=list)
    refuse_operation: str = ""
    """The reason with which operations are refused; "": they are not refused."""
    fail_controls: bool = False
    """While set, every control call fails."""
    tiers: list[TierState] = field(default_factory=list)
    """What is said about the cache tiers, one state after the other, and at last always the same;
    empty: there are none."""
    released: tuple[MemoryPart, ...] = ()
    """The parts of memory that are reported as released."""
    submitted: list[Request] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    running: dict[int, _Running] = field(default_factory=dict)
    is_shut_down: bool = False
    _receiver: Callable[[bytes], None] | None = None
    _ticking: bool = False

    def start(self, receiver: Callable[[bytes], None], on_cut: Callable[[], None]) -> None:
        self._receiver = receiver
        if not self.loads:
            self.loaded()

    def loaded(self) -> None:
        """Become ready."""
        facts = EngineFacts(
            max_total_num_tokens=1000,
            max_running_requests=self.max_running,
            max_req_input_len=self.context_len,
        )
        self.emit(Ready(facts))

    def close(self) -> None:
        self._receiver = None

    def emit(self, message: ToFrontend) -> None:
        if self._receiver is not None:
            self._receiver(encode(message))

    def send(self, data: bytes) -> None:
        match message := decode_to_engine(data):
            case Submit(seq_id, request):
                self.submitted.append(request)
                self.running[seq_id] = _Running(
                    seq_id,
                    request,
                    list(self.script(request)) or [0],
                    num_sent=len(request.prior_outputs()),
                )
                self._tick_later()
            case Abort(seq_ids, why, err_type):
                for seq_id in self.running.keys() & seq_ids:
                    self.running[seq_id].abort = Finish(
                        "abort", message=why or "Aborted.", err_type=err_type
                    )
                self._tick_later()
            case Stop(seq_id):
                self.stopped.append(self.submitted[seq_id].rid)
                self.running.pop(seq_id, None)
            case Shutdown():
                self.is_shut_down = True
            case _:
                self._called(message)

    def _called(self, call: Call) -> None:
        if self.mute and isinstance(call, GetState | GetMoments | ListRequests | FlushCache):
            return
        asyncio.get_running_loop().call_soon(self.emit, Reply(call.id, self._answer(call)))

    def _answer(self, call: Call) -> Answer:
        if self.fail_controls:
            return Refused("It raised.", status_code=500)
        match call:
            case GetState():
                return self._state()
            case GetMoments(_, since):
                self.num_asked += 1
                return Moments(since, self.moments[since:])
            case ListRequests():
                return self._listed()
            case FlushCache():
                return CacheFlush(not self.running or self.paused is PauseMode.RETRACT, 0)
            case Change():
                self.changes.append(call)
                return Done()
            case Pause(_, mode):
                self.paused = mode
                if mode is PauseMode.ABORT:
                    self._abort_all()
                return PauseDone(len(self.running))
            case Hold():
                if self.running and self.paused is None:
                    return Refused("An engine is not idle.")
                self.paused = self.paused or PauseMode.RETRACT
                return Done()
            case Continue():
                self.paused = None
                self._tick_later()
                return Done()
            case Operate(_, operation):
                self.operations.append(operation)
                if self.refuse_operation:
                    return Refused(self.refuse_operation)
                return OperationDone(0, "x.gz")

    def _state(self) -> InternalState:
        num_running = min(len(self.running), self.max_running)
        tiers = None
        if self.tiers:
            tiers = self.tiers.pop(0) if len(self.tiers) > 1 else self.tiers[0]
        waiting = list(self.running.values())[num_running:]
        free = 1000 - num_running
        return InternalState(
            num_running=num_running,
            num_queued=len(waiting),
            num_preparing=0,
            num_retracted=0,
            num_paused_reqs=0 if self.paused is None else len(self.running),
            paused=self.paused,
            released=list(self.released),
            num_pending_tokens=sum(len(running.request.prompt()) for running in waiting),
            num_running_tokens=10 * num_running,
            running_per_key=_seqs_per_key(list(self.running.values())[:num_running]),
            open_per_key=_seqs_per_key(self.running.values()),
            pool=PoolStats(total=1000, free=free, evictable=0, locked=0, held=num_running),
            settings=Settings(max_running_requests=self.max_running),
            report=EngineReport(
                figures=EngineFigures(new_token_ratio=0.5),
                metrics=self.metrics,
                tiers=tiers,
                memory_usage=MemoryUsage(weight=0.25, kvcache=0.5, graph=0.125),
                experts=ExpertLoads(
                    num_layers=2,
                    num_experts=4,
                    num_tokens=160,
                    num_unused=1,
                    balancedness=0.5,
                    rank_tokens=[100, 60],
                    eplb_balancedness=0.8,
                    num_rebalances=3,
                ),
            ),
        )

    def _listed(self) -> RequestList:
        ids = list(self.running)
        running, queue = ids[: self.max_running], ids[self.max_running :]
        return RequestList(
            preparing=[],
            queue=queue,
            retracted=[],
            running=running,
            outputs={seq_id: self.running[seq_id].num_sent for seq_id in running},
            prefilling=None,
            why="no_slot" if queue else None,
            paused=self.paused,
            num_preparing=0,
            num_queued=len(queue),
            num_running=len(running),
        )

    def _abort_all(self) -> None:
        for running in self.running.values():
            running.abort = Finish("abort", message="Aborted.")
        events = [self._step(running) for running in self.running.values()]
        self.running.clear()
        self.emit(Tokens(events))

    def _tick_later(self) -> None:
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(self.step_s, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if self.silent or self.paused is not None:
            return
        events = [
            self._step(running) for running in list(self.running.values())[: self.max_running]
        ]
        for event in events:
            if event.finish is not None:
                del self.running[event.seq_id]
        self.emit(Tokens(events))
        if self.running:
            self._tick_later()

    def _step(self, running: _Running) -> TokenEvent:
        request = running.request
        finish = running.abort or self.refuse(request)
        ids: list[int] = []
        first = running.num_sent
        while finish is None and len(ids) < self.tokens_per_event:
            limit = self._limit(request)
            if limit:
                ids.append(running.script[running.num_sent % len(running.script)])
                running.num_sent += 1
            finish = self._finish(request, ids, running.num_sent, limit)
        return TokenEvent(
            running.seq_id,
            ids,
            finish=finish,
            num_prompt=len(request.prompt()),
            num_outputs=running.num_sent,
            num_cached=self.num_cached,
            timing=Timing(0.25, 0.5) if first == 0 else None,
            output_logprobs=_block(request, ids) if request.options.logprobs is not None else None,
            prompt_logprobs=_prompt_block(request) if first == 0 else None,
            hidden_states=_hidden_states(request, ids, first),
            token_facts={
                name: [pack_ids([token, token + 1]) for token in ids]
                for name in request.options.token_facts
            },
            embedding=(
                self._embedding(request) if finish is not None and finish.type == "length" else b""
            ),
        )

    def _embedding(self, request: Request) -> bytes:
        """The first EMBEDDING_SIZE ids of the prompt, repeated."""
        if request.options.pooling is None:
            return b""
        return np.resize(request.prompt(), EMBEDDING_SIZE).astype("<f4").tobytes()

    def _limit(self, request: Request) -> int:
        room = self.context_len - len(request.prompt())
        wanted = request.sampling.max_new_tokens
        return room if wanted is None else min(wanted, room)

    def _finish(
        self, request: Request, ids: list[int], num_outputs: int, limit: int
    ) -> Finish | None:
        sampling = request.sampling
        stops = self.eos_ids | set(sampling.stop_token_ids)
        if (
            ids
            and not sampling.ignore_eos
            and num_outputs > sampling.min_new_tokens
            and ids[-1] in stops
        ):
            return Finish("stop", matched=ids[-1])
        return Finish("length", length=limit) if num_outputs >= limit else None


def _hidden_states(request: Request, ids: Sequence[int], num_before: int) -> bytes:
    """The hidden states of the tokens that were computed for an event: the prompt, if it is the
    first event, and each new token's predecessor. All EMBEDDING_SIZE numbers of a hidden state are
    its place in the answer, 0 for the prompt."""
    if not request.options.hidden_states:
        places = (
            range(num_before, num_before + len(ids)) if request.options.output_hidden_states else []
        )
        return np.repeat(np.array(places, "<f4"), EMBEDDING_SIZE).tobytes()
    prompt = [0] * len(request.prompt()) if num_before == 0 else []
    places = range(max(num_before, 1), num_before + len(ids))
    return np.repeat(np.array([*prompt, *places], "<f4"), EMBEDDING_SIZE).tobytes()


def _block(request: Request, ids: Sequence[int]) -> LogprobBlock:
    """Made-up logprobs that a test recognises: the k-th best token is the sampled id + k, with
    logprob -(k + 1) / 2."""
    asked = request.options.logprobs
    assert asked is not None
    tops = range(asked.top)
    return LogprobBlock(
        values=[-0.5] * len(ids),
        ids=list(ids),
        top_values=[[-(k + 1) / 2 for k in tops] for _ in ids],
        top_ids=[[token + k for k in tops] for token in ids],
        picked=[[-float(token) for token in asked.ids] for _ in ids],
    )


def _prompt_block(request: Request) -> LogprobBlock | None:
    asked = request.options.logprobs
    if asked is None or asked.start < 0:
        return None
    return _block(request, request.prompt()[max(asked.start, 1) :].tolist())


@dataclass(slots=True, frozen=True)
class FixedOptions:
    """The options of a server that cannot change any."""

    frontend: FrontendSettings = field(default_factory=FrontendSettings)

    def propose(self, values: Mapping[str, Any]) -> Proposal:
        raise ConfigError("This server changes no options.")


def _seqs_per_key(open_ones: Iterable[_Running]) -> list[int]:
    keys = (each.request.options.routing_key for each in open_ones)
    return list(Counter(key for key in keys if key).values())
