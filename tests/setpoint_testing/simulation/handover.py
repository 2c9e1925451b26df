"""A prefill and a decode engine whose pages move in simulated time: real schedulers, loops and rooms
over scripted executors, and connections that are slow, lose data and die.

What must hold, whatever happens: every request that nobody has aborted ends on the decode engine with
the tokens that it gets alone, no transfer waits for a prefill engine that does not have its request any more, nothing that
one side says breaks the connection, and both engines' accounting is right after every turn. With tiers, both
engines have one store, and requests continue earlier ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.handover import HandoverState, PromptReceived, PromptSent
from setpoint.core.pagerows import PageRow, WindowColumns
from setpoint.core.request import Ids
from setpoint.handover.frames import Fetch
from setpoint.handover.offers import EARLY_S, Offer, Offers
from setpoint.scheduler.scheduler_config import TierConfig
from setpoint_testing.harness import VOCAB, Harness, ids_of
from setpoint_testing.movers import Key
from setpoint_testing.scripted import hashed_token, reference

GARBAGE = 99_999
"""A token that no sequence has: what a page holds that was not written soundly."""
MAX_TICKS = 6000
MAX_HISTORY = 12
POLICIES = ("timeout", "best_effort", "wait_complete")
TIMEOUT_S = 30.0
DESERTED_S = EARLY_S + 2.0
"""How long a transfer may last while no request of the prefill engine is in its room: the request may
be late, and messages take a while."""


@dataclass(slots=True)
class Faults:
    """Chances, of a tick or of a transfer."""

    abort_prefill: float = 0.0
    abort_decode: float = 0.0
    lost_connection: float = 0.0
    torn: float = 0.0
    duplicate_room: float = 0.0
    prefill_never_comes: float = 0.0
    decode_never_comes: float = 0.0
    damaged_first_token: float = 0.0


@dataclass(slots=True, eq=False)
class _Transfer:
    seq_id: int
    fetch: Fetch
    rows: Ids
    offer: Offer | None = None
    """Set when its pages may be sent."""
    num_taken: int = 0
    deserted_s: float = 0.0
    """How long no request of the prefill engine has been in its room."""


class Network:
    """Implements ``Giver`` for the prefill engine, ``Taker`` for the decode engine and ``Receiver``
    for the rooms; both engines must be in ``prefill`` and ``decode`` before a turn."""

    prefill: Harness
    decode: Harness

    def __init__(self, rng: random.Random, faults: Faults) -> None:
        self._rng = rng
        self._faults = faults
        self._now = 0.0
        self._rooms: dict[int, int] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._transfers: dict[int, _Transfer] = {}
        """The transfers by sequence of the decode engine, which is also the number of the
        transfer."""
        self._num_lost = 0
        """Connections that have ended."""
        self.offers = Offers(self._tell_prefill, lambda: self._now)

    # ------------------------------------------------------------------ Giver

    def offer(self, seq_id: int, room: int, digest: bytes) -> None:
        assert room not in self._rooms.values()
        self._rooms[seq_id] = room
        self._soon(lambda: self.offers.add(Offer(seq_id, room, digest)))

    def supply(self, seq_id: int, rows: Ids, handed: HandoverState) -> None:
        self._soon(lambda: self.offers.supply(seq_id, rows, handed))

    def withdraw(self, seq_id: int, reason: str) -> None:
        self._soon(lambda: self.offers.withdraw(seq_id, reason))

    # ------------------------------------------------------------------ Taker

    def fetch(
        self, seq_id: int, bootstrap: Bootstrap, digest: bytes, skipped_rows: int, rows: Ids
    ) -> None:
        fetch = Fetch(seq_id, bootstrap.room, digest, skipped_rows)
        self._transfers[seq_id] = _Transfer(seq_id, fetch, rows)
        self._soon(lambda: self._transfers.get(seq_id) and self.offers.fetch(self, fetch))

    def cancel(self, seq_id: int) -> None:
        self._soon(lambda: self._cancelled(seq_id))

    def _cancelled(self, seq_id: int) -> None:
        if seq_id in self._transfers:
            self._arrived(seq_id, None, "cancelled")
            self._soon(lambda: self.offers.cancelled(self, seq_id))

    # ------------------------------------------------------------------ Receiver

    def send(self, offer: Offer) -> None:
        transfer = self._transfers.get(offer.transfer)
        if transfer is not None:
            transfer.offer = offer

    def refuse(self, transfer: int, reason: str) -> None:
        self._soon(lambda: transfer in self._transfers and self._arrived(transfer, None, reason))

    # ------------------------------------------------------------------ time

    def tick(self, seconds: float) -> None:
        """Let a while pass."""
        self._now += seconds
        due = [each for at, each in self._later if at <= self._now]
        self._later = [entry for entry in self._later if entry[0] > self._now]
        for each in due:
            each()
        self.offers.expire()
        if self._rng.random() < self._faults.lost_connection:
            self.lose("the connection was lost")
        for transfer in list(self._transfers.values()):
            if transfer.offer is not None:
                self._send(transfer, transfer.offer)
        self._watch(seconds)

    def _watch(self, seconds: float) -> None:
        living = self.prefill.scheduler.state.by_id.values()
        rooms = {each.request.options.bootstrap.room for each in living}  # type: ignore[union-attr]
        for transfer in self._transfers.values():
            is_there = transfer.fetch.room in rooms
            transfer.deserted_s = 0.0 if is_there else transfer.deserted_s + seconds
            assert transfer.deserted_s < DESERTED_S, "decode waits for nobody"

    def lose(self, reason: str) -> None:
        """The connection between the engines ends; another begins at once."""
        self._num_lost += 1
        for seq_id in list(self._transfers):
            self._arrived(seq_id, None, reason)
        self.offers.lost(self, reason)

    def _send(self, transfer: _Transfer, offer: Offer) -> None:
        """Send a few rows, perhaps unsoundly, and the end after the last."""
        assert offer.rows is not None
        assert offer.handed is not None
        if offer.is_over:
            return
        width = self.prefill.cache.row.width
        there = offer.rows.reshape(-1, width)
        here = transfer.rows.reshape(-1, width)
        for _ in range(self._rng.randrange(4)):
            row = transfer.num_taken
            if row < len(there):
                torn = self._rng.random() < self._faults.torn
                self._copy(there[row], here[row], torn=torn)
                if torn:
                    self.lose("a chunk's checksum is wrong")
                    return
                transfer.num_taken += 1
                continue
            handed = offer.handed
            if self._rng.random() < self._faults.damaged_first_token:
                handed = HandoverState(handed.num_prompt + 1, handed.seed, handed.ids)
            self._arrived(transfer.seq_id, handed, "")
            self._soon(partial(self._taken, transfer.fetch.transfer, self._num_lost))
            return

    def _taken(self, transfer: int, connection: int) -> None:
        """The decode side's word arrives, unless its connection has ended meanwhile."""
        if connection == self._num_lost:
            assert self.offers.taken(self, transfer), "the prefill side would end the connection"

    def _copy(self, there: Ids, here: Ids, *, torn: bool) -> None:
        size = self.prefill.cache.page_size
        source, target = self.prefill.executor.store, self.decode.executor.store
        for page, other in zip(there.tolist(), here.tolist(), strict=True):
            if other:
                data = source[page * size : (page + 1) * size] if page else GARBAGE
                target[other * size : (other + 1) * size] = GARBAGE if torn else data

    def _arrived(self, seq_id: int, handed: HandoverState | None, failure: str) -> None:
        transfer = self._transfers.pop(seq_id)
        self.decode.wire.post(PromptReceived(seq_id, handed, transfer.num_taken, failure))

    def _tell_prefill(self, message: object) -> None:
        if isinstance(message, PromptSent):
            del self._rooms[message.seq_id]
        self.prefill.wire.post(message)  # type: ignore[arg-type]

    def _soon(self, what: Callable[[], object]) -> None:
        at = self._now + self._rng.uniform(0.0, 0.05)
        if self._later:
            at = max(at, self._later[-1][0])  # calls and messages keep their order
        self._later.append((at, what))  # type: ignore[arg-type]


def tiers_of(page_size: int, prefetch_policy: str = "wait_complete") -> TierConfig:
    block = max(page_size, 4)
    return TierConfig(block, threshold=block, prefetch_policy=prefetch_policy)


class Run:
    """Requests on both engines, with everything that goes wrong drawn from one seed."""

    def __init__(self, seed: int, faults: Faults, *, tiers: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.faults = faults
        self.network = Network(rng, faults)
        page_size = rng.choice([1, 2, 4])
        row = rng.choice([PageRow(), PageRow(1, (WindowColumns(6, 1, 2),), read_step=2)])
        sizes = {"page_size": page_size, "row": row, "handover_timeout_s": TIMEOUT_S}
        depth = rng.choice([0, 1])
        self.tiers = tiers_of(page_size, rng.choice(POLICIES)) if tiers else None
        stored: dict[Key, np.ndarray] = {}
        self.prefill = self.network.prefill = Harness(
            num_pages=rng.choice([40, 80]) * row.width // page_size,
            handover={"giver": self.network},
            role="prefill",
            chunked_prefill_size=rng.choice([None, 4]),
            depth=depth,
            tiers=self.tiers,
            stored=stored,
            **sizes,
        )
        self.decode = self.network.decode = Harness(
            num_pages=rng.choice([40, 80]) * row.width // page_size,
            handover={"taker": self.network},
            role="decode",
            num_reserved_decode_tokens=rng.choice([1, 5]),
            mixed_chunk=rng.choice([True, False]),
            depth=depth,
            tiers=self.tiers and replace(self.tiers, limits_loss=False),
            stored=stored,
            **sizes,
        )
        for side in (self.prefill, self.decode):
            if side.mover is not None:
                side.mover.hold = True
        self.expected: dict[str, list[int]] = {}
        self.histories: list[list[int]] = []
        """Prompt and tokens of each request."""
        self.aborted: set[str] = set()

    def run(self, num_requests: int) -> None:
        """Raises AssertionError if anything is wrong."""
        shared = [self.rng.randrange(VOCAB) for _ in range(9)]
        for number in range(num_requests):
            self._arrive(number, shared)
            self._pass(self.rng.randrange(8))
        for _ in range(MAX_TICKS):
            if self._is_over():
                break
            self._pass(1)
        self._check()

    def _arrive(self, number: int, shared: list[int]) -> None:
        rng, faults, rid = self.rng, self.faults, f"r{number}"
        before = shared[: rng.randrange(9)]
        if self.tiers is not None and self.histories and rng.random() < 0.5:
            before = rng.choice(self.histories[-4:])[:MAX_HISTORY]
        prompt = before + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        num_new = rng.randrange(1, 9)
        room = 1000 + number
        if number and rng.random() < faults.duplicate_room:
            room -= 1
        bootstrap = Bootstrap(room, "prefill", 1)
        self.expected[rid] = reference(ids_of(prompt), num_new, hashed_token(VOCAB))
        self.histories.append(prompt + self.expected[rid])
        sides = [self.prefill, self.decode]
        if rng.random() < faults.prefill_never_comes:
            sides.remove(self.prefill)
        elif rng.random() < faults.decode_never_comes:
            sides.remove(self.decode)
        rng.shuffle(sides)
        for side in sides:
            side.submit(rid, prompt, max_new_tokens=num_new, bootstrap=bootstrap)
            self._pass(rng.randrange(3))

    def _pass(self, ticks: int) -> None:
        rng = self.rng
        for _ in range(ticks):
            self.network.tick(rng.uniform(0.0, 0.1))
            for side, chance in (
                (self.prefill, self.faults.abort_prefill),
                (self.decode, self.faults.abort_decode),
            ):
                open_rids = [
                    rid for rid, outcome in side.outcomes.items() if outcome.finish is None
                ]
                if open_rids and rng.random() < chance:
                    rid = rng.choice(open_rids)
                    side.abort(rid)
                    if side is self.decode:
                        self.aborted.add(rid)
                if rng.random() < 0.8:
                    side.turn()
                if side.mover is not None and side.mover.waiting and rng.random() < 0.5:
                    side.mover.finish_next(rng.randrange(len(side.mover.waiting)))

    def _is_over(self) -> bool:
        sides = (self.prefill, self.decode)
        return (
            not self.network.offers.num_open
            and all(
                outcome.finish is not None for side in sides for outcome in side.outcomes.values()
            )
            and not any(side.scheduler.state.transfers for side in sides)
        )

    def _check(self) -> None:
        for name, side in (("prefill", self.prefill), ("decode", self.decode)):
            open_rids = [rid for rid, each in side.outcomes.items() if each.finish is None]
            assert not open_rids, f"{name}: these have not ended: {open_rids}"
            assert side.scheduler.state.is_settled, f"{name} holds something"
        assert not self.network.offers.num_open, "rooms that have ended are still taken"
        for rid, outcome in self.decode.outcomes.items():
            assert outcome.finish is not None
            if rid in self.aborted and outcome.finish.type == "abort":
                assert outcome.ids == self.expected[rid][: len(outcome.ids)], rid
                continue
            assert outcome.finish.type == "length", (rid, outcome.finish)
            assert outcome.ids == self.expected[rid], (rid, outcome.ids, self.expected[rid])
        for rid, outcome in self.prefill.outcomes.items():
            assert outcome.ids in ([], self.expected[rid][:1]), (rid, outcome.ids)
        assert not np.isin(GARBAGE, [each for o in self.decode.outcomes.values() for each in o.ids])
