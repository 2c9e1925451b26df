"""Runs each step on all ranks of a model (decision 0062). Rank 0 is the engine's own process, with
the only scheduler and the only sampling; the others follow it.

Rank 0 sends each plan before it begins the step itself, together with the tokens that it sampled
last, and from then on the ranks wait for each other inside the step's kernels only. Logits that are
computed after a step are announced, too, because the ranks divide the head.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from setpoint.core.errors import ConfigError, EngineDeadError, RequestError, SetpointError
from setpoint.core.expert_placement import Placement
from setpoint.core.handover import PromptNews, PromptReceived
from setpoint.core.messages import PagesMoved
from setpoint.core.operations import LoadWeights, ReleaseMemory, RestoreMemory
from setpoint.core.plan import StepPlan, TokenMasks
from setpoint.core.plan_codec import decode_plan, encode_plan
from setpoint.core.request import Ids, pack_ids, unpack_ids
from setpoint.core.transfers import Direction, KVLocation, Mover, Transfer
from setpoint.engine.executor.engine_operations import EngineOperator
from setpoint.engine.executor.inproc import InprocExecutor, InprocStep
from setpoint.engine.executor.rank_messages import (
    CancelFetch,
    FetchPrompt,
    GiverNews,
    OfferPrompt,
    SupplyPrompt,
    TakerNews,
    ToSide,
    WithdrawPrompt,
)
from setpoint.engine.kernels.device import wait
from setpoint.engine.parallel.group import Group
from setpoint.engine.runner.model_runner import ModelRunner

RANK_ENDED = "A rank has ended; its output above says why."

Operation = ReleaseMemory | RestoreMemory | LoadWeights
"""What every rank must do with its part of the memory."""


class StepTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that a step brought back."""

    slots: bytes
    ids: bytes


class RankStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Append the tokens of the step before, and run a plan."""

    plan: bytes
    sampled: StepTokens | None


class Logits(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compute this rank's logits of hidden states [rows, C]."""

    rows: int
    hidden: bytes


class Allocate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Allocate the pool and the slots, and answer."""

    num_pages: int
    max_slots: int
    context_len: int


class RunOperation(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Carry an operation out, and answer."""

    operation: Operation


class LoadExperts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load the experts of a layer for a placement, and answer."""

    layer: int
    placement: Placement


class MoveExperts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Use the experts that were loaded last from the next step on, or give them up."""

    layer: int
    placement: Placement | None


class Move(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Move this rank's share of a transfer's pages (``core.transfers``)."""

    id: int
    direction: Direction
    place: KVLocation
    rows: bytes
    start: int
    ids: bytes
    namespace: str
    digests: bytes


class CancelMove(msgspec.Struct, frozen=True, tag=True, array_like=True):
    id: int


ToRank = (
    RankStep
    | Logits
    | Allocate
    | RunOperation
    | LoadExperts
    | MoveExperts
    | Move
    | CancelMove
    | ToSide
)


class Loaded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank has its weights."""

    weight_bytes: int
    available_bytes: int
    """Free memory before they were loaded."""
    level: str
    """The instruction set of the rank's kernels (``LoadReport.level``)."""


class RankDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank has done what it was asked to."""


class RankRefused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank cannot do it, and has changed nothing."""

    reason: str


class MoveEnded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A transfer has ended on this rank. It may come between other answers."""

    moved: PagesMoved


News = MoveEnded | GiverNews | TakerNews
FromRank = Loaded | RankDone | RankRefused | News
Heard = TypeVar("Heard", MoveEnded, GiverNews, TakerNews)

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode


class OtherRanks:
    """Rank 0's links to the others."""

    def __init__(self, group: Group, links: Sequence[Connection], *, num_sharing: int) -> None:
        """num_sharing: how many ranks share one memory; the first so many share rank 0's."""
        self.group = group
        self.num_sharing = num_sharing
        self.levels: list[str] = []
        """The instruction set of each rank's kernels; written by ``wait_for_weights``."""
        self._links = links
        self._sending = threading.Lock()
        self._heard: dict[type[News], Callable[[Any], object]] = {}
        self._answers: list[SimpleQueue[FromRank | None]] | None = None
        """A queue for each link with the rank's answers, but not its news. None in a queue says
        that the rank has ended. The whole is None until somebody listens."""

    def send(self, message: ToRank) -> None:
        """May be called from any thread."""
        data = encode(message)
        with self._sending:
            for link in self._links:
                link.send_bytes(data)

    def answers(self) -> list[FromRank]:
        """The next answer of each rank. Raises EngineDeadError if one has ended."""
        if self._answers is not None:
            found = [queue.get() for queue in self._answers]
            if None in found:
                raise EngineDeadError(RANK_ENDED)
            return found
        try:
            return [decode_from_rank(link.recv_bytes()) for link in self._links]
        except (EOFError, OSError):
            raise EngineDeadError(RANK_ENDED) from None

    def listen(self, kind: type[Heard], heard: Callable[[Heard], object]) -> None:
        """Read the links in threads from now on, and call ``heard`` for each news of this kind.
        Call it before a rank can have any."""
        self._heard[kind] = heard
        if self._answers is not None:
            return
        self._answers = [SimpleQueue() for _ in self._links]
        for link, queue in zip(self._links, self._answers, strict=True):
            threading.Thread(
                target=_listen, args=(link, queue, self._heard), name="rank-answers", daemon=True
            ).start()

    def wait_for_weights(self, weight_bytes: int, available_bytes: int) -> tuple[int, int]:
        """Wait until the ranks have their weights. Takes rank 0's own sizes, and returns the
        largest size of the weights in one memory and the least that was free in one before. Raises
        ConfigError with the reason if a rank could not load its weights."""
        weights = [weight_bytes]
        for rank, answer in enumerate(self.answers(), 1):
            if isinstance(answer, RankRefused):
                raise ConfigError(f"Rank {rank} cannot start: {answer.reason}")
            assert isinstance(answer, Loaded)
            weights.append(answer.weight_bytes)
            self.levels.append(answer.level)
            if rank >= self.num_sharing:
                available_bytes = min(available_bytes, answer.available_bytes)
        begins = range(0, len(weights), self.num_sharing)
        return max(sum(weights[at : at + self.num_sharing]) for at in begins), available_bytes

    def allocate(self, *, num_pages: int, max_slots: int, context_len: int) -> None:
        """Begin to allocate; ``check`` waits for the end."""
        self.send(Allocate(num_pages, max_slots, context_len))

    def check(self) -> None:
        """Wait until each rank has done what it was asked to. Raises RequestError with the reason
        of one that could not."""
        refusals = [
            f"rank {rank}: {answer.reason}"
            for rank, answer in enumerate(self.answers(), 1)
            if isinstance(answer, RankRefused)
        ]
        if refusals:
            raise RequestError("; ".join(refusals), status_code=500)


def _listen(
    link: Connection,
    queue: SimpleQueue[FromRank | None],
    heard: Mapping[type[News], Callable[[Any], object]],
) -> None:
    with suppress(EOFError, OSError):
        while True:
            answer = decode_from_rank(link.recv_bytes())
            if isinstance(answer, News):
                heard[type(answer)](answer)
            else:
                queue.put(answer)
    queue.put(None)


class TensorParallelExecutor(InprocExecutor):
    """Implements ``core.executor.Executor`` on rank 0."""

    def __init__(self, runner: ModelRunner, others: OtherRanks) -> None:
        super().__init__(runner)
        self.is_alone = False
        self._others = others
        self._sampled: StepTokens | None = None
        """Tokens that the other ranks have not got yet."""
        others.group.before_logits = self._announce

    def _begin(self, plan: StepPlan) -> InprocStep:
        if self.balancer is not None:
            self.balancer.before_step()
        self._others.send(RankStep(encode_plan(plan), self._sampled))
        self._sampled = None
        return _LeadingStep(self, plan, None, self._mark)

    def note_sampled(self, slots: Ids, ids: Ids) -> None:
        self._sampled = StepTokens(pack_ids(slots), pack_ids(ids))

    def _announce(self, hidden: torch.Tensor) -> None:
        data = hidden.contiguous().view(torch.uint8).cpu().numpy().tobytes()
        self._others.send(Logits(len(hidden), data))


class _LeadingStep(InprocStep):
    executor: TensorParallelExecutor

    def finish(self, masks: TokenMasks | None) -> None:
        super().finish(masks)
        wait(self.sample_done)
        if self.sampled_ids is not None:
            self.executor.note_sampled(self.forward.batch.sample_slots, self.sampled_ids)


class TensorParallelOperator(EngineOperator):
    """Implements ``core.operations.Operator`` on rank 0."""

    def __init__(self, *args: object, others: OtherRanks, **named: object) -> None:
        super().__init__(*args, **named)
        self._others = others

    def _change(self, operation: Operation) -> None:
        self._others.send(RunOperation(operation))
        refusal: SetpointError | None = None
        try:
            super()._change(operation)
        except SetpointError as error:
            refusal = error
        answers = self._others.answers()
        refusing = [answer for answer in answers if isinstance(answer, RankRefused)]
        if refusal is not None and len(refusing) == len(answers):
            raise refusal
        if refusal is not None or refusing:
            # The ranks differ now: only a new start makes them equal.
            reason = refusal or refusing[0].reason
            raise RuntimeError(f"Only some ranks could do {type(operation).__name__}: {reason}")

    def place_experts(self, layer: int, placement: Placement) -> None:
        """Fill the slots of a layer anew on all ranks, between two steps. Raises SetpointError with
        nothing changed if a rank cannot load its experts."""
        self._others.send(LoadExperts(layer, placement))
        refusal: SetpointError | None = None
        try:
            self.load_experts(layer, placement)
        except SetpointError as error:
            refusal = error
        try:
            self._others.check()
        except RequestError as error:
            refusal = error
        self._others.send(MoveExperts(layer, placement if refusal is None else None))
        if refusal is not None:
            self.drop_experts(layer)
            raise refusal
        self.move_experts(layer, placement)


class Side(Protocol):
    """A rank's part in handovers (``rank_handovers.RankSide``)."""

    def do(self, message: ToSide) -> None: ...


def follow(
    runner: ModelRunner,
    link: Connection,
    operator: EngineOperator,
    movers: Callable[[Callable[[PagesMoved], object]], Mover] | None = None,
    sides: Callable[[Callable[[PromptNews], object]], Side] | None = None,
) -> None:
    """Do what rank 0 asks for, until it closes the link. operator: for this rank's runner. movers:
    makes what moves this rank's pages, once they are there, and tells when a transfer has ended.
    sides: the same for handovers."""
    link = _LockedLink(link)
    mover: Mover | None = None
    side: Side | None = None
    while True:
        while not link.poll() and _prepare(runner):
            pass
        try:
            message = decode_to_rank(link.recv_bytes())
        except EOFError:
            return
        match message:
            case RankStep(plan, sampled):
                if sampled is not None:
                    slots, ids = unpack_ids(sampled.slots), unpack_ids(sampled.ids)
                    # A failed row's id is negative (``SlotTable.append``).
                    runner.slots.append_known(slots, np.ones_like(slots), np.maximum(ids, 0))
                runner.follow(decode_plan(plan))
            case Logits(rows, hidden):
                states = torch.frombuffer(bytearray(hidden), dtype=runner.dtype).view(rows, -1)
                runner.follow_logits(states.to(runner.device))
            case Allocate(num_pages, max_slots, context_len):
                _answer(
                    link,
                    lambda: runner.allocate(
                        num_pages=num_pages, max_slots=max_slots, context_len=context_len
                    ),
                )
                if movers is not None:
                    mover = movers(lambda moved: link.send_bytes(encode(MoveEnded(moved))))
                if sides is not None:
                    side = sides(lambda message: link.send_bytes(encode(_news(message))))
            case RunOperation(operation):
                _answer(link, lambda: operator.operate(0, operation))
            case LoadExperts(layer, placement):
                _answer(link, lambda: operator.load_experts(layer, placement))
            case Move():
                assert mover is not None
                transfer = _transfer(message)
                move = mover.load if transfer.direction is Direction.LOAD else mover.save
                move(transfer)
            case CancelMove(transfer_id):
                assert mover is not None
                mover.cancel(transfer_id)
            case OfferPrompt() | SupplyPrompt() | WithdrawPrompt() | FetchPrompt() | CancelFetch():
                assert side is not None
                side.do(message)
            case MoveExperts(layer, None):
                operator.drop_experts(layer)
            case MoveExperts(layer, placement):
                operator.move_experts(layer, placement)


def _news(message: PromptNews) -> News:
    return TakerNews(message) if isinstance(message, PromptReceived) else GiverNews(message)


class _LockedLink:
    """A link on which several threads send."""

    def __init__(self, link: Connection) -> None:
        self._link, self._lock = link, threading.Lock()
        self.poll, self.recv_bytes = link.poll, link.recv_bytes

    def send_bytes(self, data: bytes) -> None:
        with self._lock:
            self._link.send_bytes(data)


def _transfer(move: Move) -> Transfer:
    return Transfer(
        move.id,
        move.direction,
        move.place,
        unpack_ids(move.rows),
        move.start,
        unpack_ids(move.ids),
        move.namespace,
        move.digests,
    )


def _prepare(runner: ModelRunner) -> bool:
    """What a rank does while it waits; False if there is nothing."""
    ahead = getattr(runner, "claim_ahead", None)
    return ahead is not None and ahead.advance()


def _answer(link: Connection, act: object) -> None:
    try:
        act()
    except SetpointError as error:
        link.send_bytes(encode(RankRefused(str(error))))
    else:
        link.send_bytes(encode(RankDone()))
