"""A store of blocks in virtual time that several simulated engines share, and the cache tiers of such
an engine: the real mover, tiers, transfers and identity of weights, whose jobs take virtual time.

Pages hold tokens together with the weights that computed them. A sequence that reads anything but its own
tokens, computed with the present weights, gets a token that no sequence may have.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import numpy as np

from setpoint.core.identity import engine_digest
from setpoint.core.messages import PagesMoved, PrefixFound
from setpoint.core.operations import (
    AttachStorage,
    ClearStorage,
    DetachStorage,
    LoadWeights,
    RestoreMemory,
)
from setpoint.core.plan import StepPlan
from setpoint.core.preparation import Need
from setpoint.core.records import (
    CacheFlushed,
    Operated,
    Paused,
    PreparationEnded,
    Record,
    Retraction,
    TransferEnded,
)
from setpoint.core.request import Ids
from setpoint.core.result import StepResult
from setpoint.core.transfers import Direction, Transfer
from setpoint.tiers.identity import TierIdentity, Work
from setpoint.tiers.mover import Job, StoreMover, Tier
from setpoint.tiers.store import Bytes, StoreCounts, StoreError
from setpoint_testing.scripted import EMPTY, ScriptedStep
from setpoint_testing.simulation.engine import KILLED, SimulatedEngine, SimulatedExecutor

FOREIGN = 999_999
"""What a sequence reads where a page does not hold its own token."""
WRONG_TOKEN = ord("z")
"""The output of a sequence that has read something foreign; no other output is this."""
SUM_BYTES = 4

Kind = Literal["sweep", "lookup", "load", "save"]
Trouble = Literal["", "errors", "slow", "hang"]


class Gone(BaseException):
    """The process has ended in the middle of a call of the store."""


@dataclass
class SharedStorage:
    """The blocks that outlive engines, and what is wrong with the place where they are."""

    rng: Random
    seen: Counter[str] = field(default_factory=Counter)
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    """Name -> bytes and their checksum."""
    trouble: Trouble = ""
    doomed: Kind | None = None
    """The kind of job in which an engine ends, the next time that one does it."""
    doubles: int = 0
    """So many of the next messages come twice."""
    hung: list[Callable[[], None]] = field(default_factory=list)
    """What goes on when the store answers again."""

    def begin(self, trouble: Trouble) -> None:
        self.trouble = trouble
        self.seen[f"store: {trouble}"] += 1

    def recover(self) -> None:
        self.trouble = ""
        hung, self.hung = self.hung, []
        for go_on in hung:
            go_on()

    def job_s(self) -> float:
        """How long the next job takes."""
        if self.trouble == "slow":
            return self.rng.uniform(0.3, 4.0)
        return self.rng.uniform(0.0, self.rng.choice([0.001, 0.05, 0.4]))

    def damage(self) -> None:
        """Change a byte of a block, or cut one."""
        if not self.blocks:
            return
        key = self.rng.choice(sorted(self.blocks))
        data = bytearray(self.blocks[key])
        if self.rng.random() < 0.5:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        else:
            del data[self.rng.randrange(len(data)) :]
        self.blocks[key] = bytes(data)

    def lose(self) -> None:
        """Evict some blocks."""
        for key in self.rng.sample(sorted(self.blocks), len(self.blocks) // 3):
            del self.blocks[key]
            self.seen["blocks evicted"] += 1


class EngineStore:
    """The shared blocks as one engine's store. Implements ``tiers.store.Store``."""

    def __init__(self, storage: SharedStorage) -> None:
        self.counts = StoreCounts()
        self._storage = storage

    def sweep(self) -> None:
        """There is nothing to do."""

    def num_leading(self, keys: Sequence[bytes]) -> int:
        self._may_fail("lookup" if len(keys) > 1 else "save")
        blocks = self._storage.blocks
        return next((at for at, key in enumerate(keys) if key not in blocks), len(keys))

    def get(self, key: bytes) -> Bytes | None:
        self._may_fail("load")
        sealed = self._storage.blocks.get(key)
        if sealed is None:
            return None
        data = sealed[:-SUM_BYTES]
        if zlib.crc32(data).to_bytes(SUM_BYTES, "little") != sealed[-SUM_BYTES:]:
            self.counts.damaged += 1
            self._storage.seen["damaged blocks found"] += 1
            del self._storage.blocks[key]
            return None
        return np.frombuffer(data, np.uint8)

    def put(self, key: bytes, data: Bytes) -> int:
        storage, content = self._storage, data.tobytes()
        sealed = content + zlib.crc32(content).to_bytes(SUM_BYTES, "little")
        if storage.doomed == "save" and storage.rng.random() < 0.5:
            storage.blocks[key] = sealed[: storage.rng.randrange(len(sealed))]
            storage.seen["blocks torn"] += 1
        self._may_fail("save")
        if key in storage.blocks:
            return 0
        storage.blocks[key] = sealed
        return len(sealed)

    def clear(self) -> int:
        return 0

    def size(self) -> tuple[int, int]:
        return len(self._storage.blocks), sum(map(len, self._storage.blocks.values()))

    def close(self) -> None:
        """There is nothing to do."""

    def _may_fail(self, kind: Kind) -> None:
        storage = self._storage
        if storage.doomed == kind and storage.rng.random() < 0.7:
            storage.doomed = None
            raise Gone
        if storage.trouble == "errors" and storage.rng.random() < 0.7:
            storage.seen["errors of the store"] += 1
            if storage.rng.random() < 0.5:
                raise ValueError("a store of the user's own raises anything")
            raise StoreError("The store does not answer.")


class PoolMemory:
    """The pages of a pool, position by position."""

    def __init__(self, num_positions: int) -> None:
        self.tokens = np.full(num_positions, EMPTY, np.int64)
        self.makers = np.zeros(num_positions, np.int64)
        """Which weights have computed the position."""
        self.writing = np.zeros(num_positions, np.int32)
        """How many steps without a result write here."""


class SimulatedRows:
    """Implements ``tiers.mover.PoolRows``."""

    width = 1

    def __init__(self, memory: PoolMemory, page_size: int) -> None:
        self._memory, self._page = memory, page_size
        self.row_bytes = page_size * 2 * 8

    def read(self, rows: Ids) -> Bytes:
        where = self._where(rows)
        tokens = self._memory.tokens[where]
        tokens[self._memory.writing[where] > 0] = FOREIGN
        both = np.stack((tokens, self._memory.makers[where]), axis=-1)
        return np.frombuffer(both.tobytes(), np.uint8)

    def write(self, rows: Ids, data: Bytes, *, first: int = 0) -> None:
        both = np.frombuffer(data.tobytes(), np.int64).reshape(-1, self._page, 2)[first:]
        where = self._where(rows)
        self._memory.tokens[where], self._memory.makers[where] = both[..., 0], both[..., 1]

    def scribble(self, rows: Ids) -> None:
        """Leave something undefined in these rows."""
        self._memory.tokens[self._where(rows)] = FOREIGN

    def _where(self, rows: Ids) -> Ids:
        where: Ids = rows[:, None] * self._page + np.arange(self._page)
        return where


class TieredExecutor(SimulatedExecutor):
    """Keeps with each position who has computed it."""

    def __init__(self, engine: SimulatedEngine, num_pages: int, page_size: int) -> None:
        super().__init__(engine, num_pages, page_size)
        self._written: list[list[int]] = []
        self.take()

    def take(self) -> None:
        """Have new memory."""
        self.memory = PoolMemory(len(self.store))
        self.store = self.memory.tokens

    @property
    def rows(self) -> SimulatedRows:
        return SimulatedRows(self.memory, self._page_size)

    def submit(self, plan: StepPlan) -> ScriptedStep:
        written: list[list[int]] = []
        self._written = written
        step, memory = super().submit(plan), self.memory
        result = step.result

        def and_written() -> StepResult:
            for where in written:
                memory.writing[where] -= 1
            return result()

        step.result = and_written  # type: ignore[method-assign]
        return step

    def _write(self, slot: int, start: int, end: int, num_guesses: int) -> None:
        super()._write(slot, start, end, num_guesses)
        where = self._where(slot, 0, start, end)
        self.memory.makers[where] = maker_of(self._engine.operator.weights)
        self.memory.writing[where] += 1
        self._written.append(where)

    def _read(self, slot: int, start: int, end: int) -> Ids:
        history = super()._read(slot, start, end)
        makers = self.memory.makers[self._where(slot, 0, 0, end)]
        history[makers != maker_of(self._engine.operator.weights)] = FOREIGN
        return history

    def sample(self, slot: int, history: Ids) -> int:
        token = super().sample(slot, history)
        own = self._ids[slot][: len(history)]
        if (history == own).all():
            return token
        self._engine.world.note(self._engine, f"slot {slot} reads {history} instead of {own}")
        return WRONG_TOKEN


def maker_of(weights: str) -> int:
    return zlib.crc32(weights.encode())


class VirtualWorker:
    """Implements ``tiers.mover.Worker``: a job happens at once at some moment within the time that it
    takes, and is known to have happened at the end of that time."""

    def __init__(self, tiers: SimulatedTiers) -> None:
        self._tiers, self._engine = tiers, tiers.engine
        self._storage, self._loop = tiers.storage, tiers.engine.world.loop
        self._jobs: deque[tuple[Kind, Job]] = deque()
        self.doing: Kind | None = None

    def __len__(self) -> int:
        return len(self._jobs) + (self.doing is not None)

    def add(self, job: Job) -> None:
        self._jobs.append((self._tiers.next_kind, job))
        if self.doing is None:
            self._next()

    def _next(self) -> None:
        self.doing, job = self._jobs.popleft()
        self._begin(job)

    def _begin(self, job: Job) -> None:
        if self._storage.trouble == "hang":
            self._storage.seen[f"hangs in a {self.doing}"] += 1
            self._storage.hung.append(lambda: self._begin(job))
            return
        seconds = self._storage.job_s()
        at = self._storage.rng.uniform(0.0, seconds)
        self._loop.call_at(self._engine.clock.now() + at, self._do, job, seconds - at)

    def _do(self, job: Job, rest_s: float) -> None:
        if self._engine.code is not None:
            return
        if self._engine.is_standing:
            self._loop.call_later(0.1, self._do, job, rest_s)
            return
        self._tiers.posted = []
        try:
            job()
        except Gone:
            self._storage.seen[f"killed within a {self.doing}"] += 1
            self._engine.die(KILLED)
            return
        self._loop.call_later(rest_s, self._end, self._tiers.posted)

    def _end(self, messages: list[PrefixFound | PagesMoved]) -> None:
        if self._engine.code is not None:
            return
        self.doing = None
        for message in messages:
            self._tiers.deliver(message)
        if self._jobs:
            self._next()


@dataclass(slots=True)
class _Open:
    """A transfer that has not ended."""

    transfer: Transfer
    rows: SimulatedRows
    happened: Counter[str]
    """What had happened to the engine when it began."""
    is_cancelled: bool = False


class SimulatedTiers:
    """The tiers of one simulated engine. Implements ``core.transfers.Mover`` around the real one,
    and ``tiers.identity.IdentifiedTiers``."""

    def __init__(
        self, engine: SimulatedEngine, executor: TieredExecutor, storage: SharedStorage, block: int
    ) -> None:
        self.engine, self.storage, self._executor = engine, storage, executor
        self.posted: list[PrefixFound | PagesMoved] = []
        """What the present job has said."""
        self.next_kind: Kind = "sweep"
        self._open: dict[int, _Open] = {}
        self._happened: Counter[str] = Counter()
        self._has_cancelled = False
        self.workers: list[VirtualWorker] = []
        self._block, self._page = block, executor.rows.row_bytes // 16
        self.real = StoreMover(
            [Tier("storage", EngineStore(storage))],
            lambda: executor.rows,
            block=block,
            page_size=self._page,
            post=lambda message: self.posted.append(message),
            worker=self._worker,
        )
        self.identity = TierIdentity(self.real.serve_as, self._found_identity, self._later)
        self.identity.begin()

    @property
    def is_busy(self) -> bool:
        return bool(self._open) or any(map(len, self.workers))

    def _worker(self, name: str) -> VirtualWorker:
        self.workers.append(VirtualWorker(self))
        return self.workers[-1]

    # ------------------------------------------------------------------ identity

    def _found_identity(self) -> bytes:
        return engine_digest(
            {"weights": self.engine.operator.weights, "page size": str(self._page)}
        )

    def _later(self, work: Work) -> None:
        def do() -> None:
            if self.engine.code is None:
                work()

        self.engine.world.loop.call_later(self.storage.rng.uniform(0.0, 0.3), do)

    def change_storage(self, operation: AttachStorage | DetachStorage | ClearStorage) -> None:
        raise NotImplementedError

    def before(self, operation: LoadWeights | RestoreMemory) -> None:
        self.identity.forget()

    def after(self, operation: LoadWeights | RestoreMemory, error: Exception | None) -> None:
        assert error is None
        self.identity.begin()

    # ------------------------------------------------------------------ from the loop

    def look_up(self, seq_id: int, digests: bytes) -> None:
        self.next_kind = "lookup"
        self.storage.seen["lookups"] += 1
        self.real.look_up(seq_id, digests)

    def load(self, transfer: Transfer) -> None:
        self.next_kind = "load"
        self._begin(transfer).scribble(transfer.rows)
        self.real.load(transfer)

    def save(self, transfer: Transfer) -> None:
        self.next_kind = "save"
        self._begin(transfer)
        self.real.save(transfer)

    def _begin(self, transfer: Transfer) -> SimulatedRows:
        rows = self._executor.rows
        self._open[transfer.id] = _Open(transfer, rows, self._happened.copy())
        self.storage.seen[f"{transfer.direction}s"] += 1
        self.engine.world.note(
            self.engine, f"{transfer.direction} {transfer.id} of {len(transfer.rows)} pages"
        )
        return rows

    def cancel(self, transfer_id: int) -> None:
        self._has_cancelled = True
        if transfer_id in self._open:
            self._open[transfer_id].is_cancelled = True
        self.real.cancel(transfer_id)

    # ------------------------------------------------------------------ what becomes of it

    def deliver(self, message: PrefixFound | PagesMoved) -> None:
        if isinstance(message, PagesMoved):
            self._end(message)
        self.engine.world.note(self.engine, f"is told {message}")
        self.engine.link.post(message)
        if self.storage.doubles:
            self.storage.doubles -= 1
            self.storage.seen["messages twice"] += 1
            again_s = self.storage.rng.uniform(0.0, 0.5)
            self.engine.world.loop.call_later(again_s, self._again, message)

    def _again(self, message: PrefixFound | PagesMoved) -> None:
        if self.engine.code is None:
            self.engine.link.post(message)

    def _end(self, message: PagesMoved) -> None:
        ended = self._open.pop(message.id)
        transfer, seen = ended.transfer, self.storage.seen
        if transfer.direction is Direction.LOAD:
            ended.rows.scribble(transfer.rows[message.num_tokens // self._page :])
            seen["tokens loaded"] += message.num_tokens
        else:
            seen["tokens saved"] += message.num_tokens
        if ended.is_cancelled:
            seen[f"{transfer.direction} ended after it was cancelled"] += 1
        for what in self._happened - ended.happened:
            seen[f"{transfer.direction} ended after {what}"] += 1

    def died(self) -> None:
        for worker in self.workers:
            if worker.doing is not None:
                self.storage.seen[f"killed during a {worker.doing}"] += 1

    def on(self, record: Record) -> None:
        match record:
            case PreparationEnded(need=Need.CACHE, outcome=outcome):
                doing = "load" if self._has_cancelled else "lookup"
                name = f"aborted in a {doing}" if outcome == "aborted" else f"prompt {outcome}"
                self.storage.seen[name] += 1
                self._has_cancelled = False
            case Paused():
                self._happened["a pause"] += 1
            case Retraction():
                self._happened["a retraction"] += 1
            case CacheFlushed(flushed=True):
                self._happened["a flush"] += 1
            case Operated(what=what, error=""):
                self._happened[what] += 1
            case TransferEnded(why=why) if why:
                self.storage.seen[f"transfer ended: {why}"] += 1
