"""Connects an engine of a prefill or decode server with the engines of the other kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from setpoint.core.handover import (
    Giver,
    PromptNews,
    Taker,
)
from setpoint.core.handshake import key_for
from setpoint.core.messages import Posted
from setpoint.core.operations import LoadWeights, Operation, Operator
from setpoint.engine.executor.rank_handovers import RankedGiver, RankedTaker, RankSide
from setpoint.engine.executor.tensor_parallel import OtherRanks
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.engine.runner.pool_store import PoolStore
from setpoint.handover.announcements import LOOPBACKS, WILDCARDS, key_of
from setpoint.handover.bootstrap_client import register
from setpoint.handover.frames import HandoverError
from setpoint.handover.giver import RoomGiver, listening
from setpoint.handover.giving import Terms
from setpoint.handover.identity import Identity
from setpoint.handover.mover_thread import MoverThread
from setpoint.handover.taker import RoomTaker
from setpoint.handover.taking import Wants
from setpoint.launch.child.computation_identity import ComputationIdentity

logger = logging.getLogger(__name__)

IRRELEVANT = ("whether steps are captured", "--ep-num-redundant-experts", "--nnodes")
"""Facts of an engine on which the bits of its cache do not depend."""


@dataclass(slots=True, frozen=True)
class HandoverSetup:
    """How an engine takes part in handovers."""

    role: str
    """"prefill" or "decode"."""
    host: str
    """The address at which a prefill server listens, as its option gives it."""
    bootstrap_port: int
    server_key: bytes
    """See ``EngineJob.handover_key``."""
    api_key: str | None
    """The key of both servers, if they have one: transfers are authenticated with it."""
    checksums: bool
    dp_rank: int


@dataclass(slots=True)
class Sides:
    """The side of handovers that a rank of an engine is on."""

    computation: ComputationIdentity
    tp_rank: int
    giver: RoomGiver | None = None
    taker: RoomTaker | None = None

    def renew(self, operation: LoadWeights) -> None:
        """Tell every new connection what the engine's keys and values depend on now; those that
        exist end."""
        self.computation = self.computation.with_weights(operation)
        for side in (self.giver, self.taker):
            if side is not None:
                side.renew(peer_identity(self.computation, self.tp_rank))


@dataclass(slots=True, frozen=True)
class Handovers:
    """What the scheduler of an engine calls: it moves the shares of all ranks."""

    sides: Sides | None = None
    """The sides of rank 0, if the engine is on one."""
    giver: Giver | None = None
    taker: Taker | None = None


def open_handovers(
    setup: HandoverSetup | None,
    computation: ComputationIdentity,
    runner: ModelRunner,
    others: OtherRanks | None,
    post: Callable[[Posted], None],
    at_end: ExitStack,
) -> Handovers:
    """post: puts a message in the loop's inbox, from any thread."""
    if setup is None:
        return Handovers()
    ranked = ranks_of(setup.role, others, post)
    note = post if ranked is None else ranked.note_own
    sides = sides_of(setup, computation, runner, note, at_end)
    if isinstance(ranked, RankedGiver) and sides.giver is not None:
        ranked.lead(sides.giver)
        return Handovers(sides, giver=ranked)
    if isinstance(ranked, RankedTaker) and sides.taker is not None:
        ranked.lead(sides.taker)
        return Handovers(sides, taker=ranked)
    return Handovers(sides, sides.giver, sides.taker)


def ranks_of(
    role: str, others: OtherRanks | None, post: Callable[[Posted], None]
) -> RankedGiver | RankedTaker | None:
    """What has all ranks hand over their shares; None if there is only one."""
    if others is None:
        return None
    return RankedGiver(others, post) if role == "prefill" else RankedTaker(others, post)


def sides_of(
    setup: HandoverSetup,
    computation: ComputationIdentity,
    runner: ModelRunner,
    post: Callable[[Any], object],
    at_end: ExitStack,
    tp_rank: int = 0,
) -> Sides:
    """The side of one rank. post: takes what it has to say, in any thread."""
    identity, store = peer_identity(computation, tp_rank), PoolStore(runner.pool)
    shared = None if setup.api_key is None else key_for("transfers", setup.api_key)
    mover, host = MoverThread(), setup.host
    at_end.callback(mover.stop)
    if setup.role == "decode":
        wants = Wants(store, identity, setup.checksums)
        taker = RoomTaker(
            mover, wants, post, key_of if shared is None else lambda *_: shared, tp_rank=tp_rank
        )
        return Sides(computation, tp_rank, taker=taker)
    listener = listening(host)
    at_end.callback(listener.close)
    terms = Terms(store, identity, shared or setup.server_key, setup.checksums)
    giver = RoomGiver(mover, listener, terms, post)
    number = listener.getsockname()[1]
    own_server = LOOPBACKS[0] if host in WILDCARDS else host

    async def announce() -> None:
        try:
            await register(
                own_server,
                setup.bootstrap_port,
                setup.server_key,
                rank=setup.dp_rank,
                tp_rank=tp_rank,
                address=host,
                number=number,
            )
        except HandoverError as error:
            logger.error("Decode servers cannot find this engine: %s.", error)

    mover.call(lambda: mover.spawn(announce()))
    logger.info("Decode servers fetch keys and values at port %d of %s.", number, host)
    return Sides(computation, tp_rank, giver=giver)


def peer_identity(computation: ComputationIdentity, tp_rank: int = 0) -> Identity:
    facts = {name: each for name, each in computation.facts().items() if name not in IRRELEVANT}
    if computation.is_dummy:
        facts["--random-seed"] = str(computation.engine.seed)
    facts["rank of the engine"] = str(tp_rank)
    return Identity({name: value[:4096] for name, value in facts.items()})


class LateSides:
    """The sides of a rank but the first, which are made when the rank has its pool. Implements
    ``Operator`` around the rank's own."""

    def __init__(
        self,
        setup: HandoverSetup,
        computation: ComputationIdentity,
        runner: ModelRunner,
        operator: Operator,
        at_end: ExitStack,
        tp_rank: int,
    ) -> None:
        self._setup, self._computation = setup, computation
        self._runner, self._operator = runner, operator
        self._at_end, self._tp_rank = at_end, tp_rank
        self._sides: Sides | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._operator, name)  # what only an EngineOperator can do

    def operate(self, call_id: int, operation: Operation) -> str:
        path = self._operator.operate(call_id, operation)
        if isinstance(operation, LoadWeights):
            if self._sides is None:
                self._computation = self._computation.with_weights(operation)
            else:
                self._sides.renew(operation)
        return path

    def make(self, post: Callable[[PromptNews], object]) -> RankSide:
        self._sides = sides = sides_of(
            self._setup, self._computation, self._runner, post, self._at_end, self._tp_rank
        )
        return RankSide(sides.giver, sides.taker)
