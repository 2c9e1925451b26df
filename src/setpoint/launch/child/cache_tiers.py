"""Builds the cache tiers of a rank: opens the stores, and finds out which engine this is, so that
blocks are shared by engines that compute the same bits and by no others."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from setpoint.config.environment import EnvSettings
from setpoint.config.groups.tiers import (
    COMMON,
    StorageConfig,
    TierOptions,
    check_storage,
    given_settings,
    storage_config,
)
from setpoint.core.control import TierState
from setpoint.core.errors import CheckpointError, ConfigError, RequestError, SetpointError
from setpoint.core.identity import engine_digest, sources_digest, weights_digest
from setpoint.core.messages import PagesMoved, PrefixFound
from setpoint.core.operations import (
    AttachStorage,
    ClearStorage,
    DetachStorage,
    LoadWeights,
    Operation,
    Operator,
    RestoreMemory,
    StorageOrder,
)
from setpoint.core.transfers import Mover
from setpoint.core.weightfiles import Identities
from setpoint.engine.executor.rank_moves import RankedMover
from setpoint.engine.executor.tensor_parallel import OtherRanks
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.engine.runner.page_rows import PageRows
from setpoint.launch.child.computation_identity import ComputationIdentity
from setpoint.launch.child.storages import Opener
from setpoint.scheduler.tiers import Tiers, TierTotals
from setpoint.tiers.identity import TierIdentity, TierOperator
from setpoint.tiers.memory_store import MemoryStore
from setpoint.tiers.mover import StoreMover, Tier, block_bytes
from setpoint.tiers.store import StoreError

logger = logging.getLogger(__name__)

COMPUTING = [
    f"engine/{part}"
    for part in ("attention", "kernels", "layers", "models", "parallel", "quant", "runner")
]
"""Parts of ``engine`` that compute keys and values. The rest moves messages, chooses tokens and
starts what is here: a version that changes only that finds what the one before has stored."""
UNTIL_THE_END = "until this server ends, or a client changes that again."
HOST, STORAGE = "host", "storage"


@dataclass(slots=True, frozen=True)
class TierSetup:
    """What the tiers of every rank are made from."""

    options: TierOptions
    storage: StorageConfig
    """The settings of the storage that was asked for at the start."""
    order: StorageOrder | None
    """See ``EngineJob.storage``."""
    is_restart: bool
    """See ``EngineJob``."""
    env: EnvSettings
    block: int
    """Tokens of a block."""
    weight_version: str


class CacheTiers:
    """The tiers of one rank."""

    def __init__(
        self,
        setup: TierSetup,
        computation: ComputationIdentity,
        runner: ModelRunner,
        rank: int,
        post: Callable[[PrefixFound | PagesMoved], object],
        files: Identities,
    ) -> None:
        """files: ``ComputationIdentity.noted_weights`` from before the weights were loaded. Raises
        ConfigError if the storage cannot be used."""
        self._setup, self._computation = setup, computation
        self._runner, self._rank = runner, rank
        self._began = time.monotonic()
        self._rows: PageRows | None = None
        self._rows_of: object = None
        self.backend = setup.options.hicache_storage_backend
        tiers = []
        if computation.engine.device != "cpu":
            host_bytes = _host_bytes(setup.options, runner.pool.num_bytes)
            tiers.append(Tier(HOST, MemoryStore(host_bytes)))
        tiers += self._storage_at_start(setup.order)
        self.mover = StoreMover(
            tiers,
            self._present_rows,
            block=setup.block,
            page_size=computation.engine.page_size,
            post=post,
        )
        self.movers: Mover = self.mover
        """What the scheduler calls: on several ranks, it moves the shares of all."""
        self._files = self._coming = files
        """The files of the weights, as they were when these were loaded, or will have been."""
        self._is_mixed = False
        """Whether the prefix cache may have pages of earlier weights."""
        self.identity = TierIdentity(self.mover.serve_as, self._identity)
        self.identity.begin()

    @property
    def storage(self) -> Tier | None:
        return next((tier for tier in self.mover.tiers if tier.name == STORAGE), None)

    def _storage_at_start(self, order: StorageOrder | None) -> list[Tier]:
        """The storage of the options, or the one that operators have attached before this engine
        was started, or none. One that cannot be used is switched off, because the engine can do
        without; but that of the options raises ConfigError when the server starts."""
        if isinstance(order, DetachStorage):
            return []
        if order is not None:
            self.backend = order.backend
        if self.backend is None:
            return []
        try:
            config = self._setup.storage if order is None else self._asked_for(order)
            return [self.open_storage(self.backend, config)]
        except (ConfigError, StoreError) as error:
            if order is None and not self._setup.is_restart:
                raise ConfigError(f"--hicache-storage-backend {self.backend}: {error}") from None
            logger.error("The storage %s cannot be opened again: %s", self.backend, error)
            tier = Tier(STORAGE, MemoryStore(0))
            tier.switch_off(str(error))
            return [tier]

    def open_storage(self, backend: str, config: StorageConfig) -> Tier:
        """Open the store of a backend. Raises StoreError."""
        engine = self._computation.engine
        opener = Opener(
            env=self._setup.env,
            owner=hashlib.sha256(f"{engine.model_folder} {self._rank}".encode()).digest(),
            block_bytes=block_bytes(self._present_rows(), self._setup.block, engine.page_size),
        )
        opened = opener.open(backend, config)
        logger.info("Cache tier %s: %s, in %s", STORAGE, backend, opened.place)
        return Tier(STORAGE, opened.store, opened.place)

    def state(self, tiers: Tiers | None) -> TierState:
        """tiers: the scheduler's."""
        totals = TierTotals() if tiers is None else tiers.totals
        counts, num_blocks, num_bytes = self.mover.counts, 0, 0
        for tier in self.mover.tiers:
            size = tier.try_(lambda store: store.size(), proves=False)
            if isinstance(size, tuple):
                num_blocks, num_bytes = num_blocks + size[0], num_bytes + size[1]
        off = [f"{tier.name}: {tier.off}" for tier in self.mover.tiers if tier.off]
        if tiers is not None and tiers.off:
            off.append(tiers.off)
        return TierState(
            backend=None if self.storage is None else self.backend,
            place="" if self.storage is None else self.storage.place,
            has_tier=bool(self.mover.tiers),
            off="; ".join(off),
            saves_selectively=tiers is not None and tiers.saves_selectively,
            num_blocks=num_blocks,
            num_bytes=num_bytes,
            loaded_tokens=totals.loaded_tokens,
            saved_tokens=totals.saved_tokens,
            load_s=totals.load_s,
            save_s=totals.save_s,
            earned_s=totals.earned_s,
            missed_tokens=dict(totals.missed),
            dropped_tokens=dict(totals.dropped),
            lost_blocks=asdict(counts),
            loaded_by_tier={tier.name: tier.loaded_tokens for tier in self.mover.tiers},
            loaded_bytes=sum(tier.loaded_bytes for tier in self.mover.tiers),
            saved_bytes=sum(tier.saved_bytes for tier in self.mover.tiers),
            age_s=time.monotonic() - self._began,
            num_clearings=0 if self.storage is None else self.storage.num_clearings,
            clear_error="" if self.storage is None else self.storage.clear_error,
        )

    def change_storage(self, operation: AttachStorage | DetachStorage | ClearStorage) -> None:
        """Raises RequestError if that is impossible now."""
        present = self.storage
        if self.movers is not self.mover:
            raise RequestError("The storage of a model on several ranks cannot be changed here.")
        if isinstance(operation, AttachStorage):
            if present is not None:
                if not operation.replaces:
                    raise RequestError("A storage is in use; detach it first (DELETE).")
                self.mover.detach(present)
            try:
                config = self._asked_for(operation)
                self.mover.attach(self.open_storage(operation.backend, config))
            except (ConfigError, StoreError) as error:
                raise RequestError(str(error)) from None
            self.backend = operation.backend
            logger.warning("%s is the cache's storage %s", operation.backend, UNTIL_THE_END)
            return
        if present is None:
            raise RequestError("No storage is in use.")
        if isinstance(operation, DetachStorage):
            self.mover.detach(present)
            logger.warning("The cache has no storage %s", UNTIL_THE_END)
        elif present.off:
            raise RequestError(f"The storage cannot be cleared, because it is off: {present.off}")
        else:
            self.mover.clear(present)

    def _asked_for(self, operation: AttachStorage) -> StorageConfig:
        """The settings of a storage that a client names. Raises ConfigError, also for those that
        hold as long as the server runs."""
        if operation.settings.startswith("@"):
            raise ConfigError(
                "A file with settings is read only at the start; give the JSON object."
            )
        options = TierOptions(
            enable_hierarchical_cache=True,
            hicache_storage_backend=operation.backend,
            hicache_storage_backend_extra_config=operation.settings or None,
        )
        check_storage(options)
        config = storage_config(options)
        for name in sorted(COMMON & given_settings(options)):
            if getattr(config, name) != (at_start := getattr(self._setup.storage, name)):
                raise ConfigError(
                    f"{name} is {at_start} as long as this server runs; it"
                    " can be given at the start."
                )
        return config

    def before(self, operation: LoadWeights | RestoreMemory) -> None:
        self.identity.forget()
        computation = self._computation
        if isinstance(operation, LoadWeights):
            computation = computation.with_weights(operation)
        self._coming = computation.noted_weights()

    def after(self, operation: LoadWeights | RestoreMemory, error: Exception | None) -> None:
        if error is not None and not isinstance(error, SetpointError):
            logger.warning("The cache tiers are not used: it is not known which weights are there.")
            return
        if error is None:
            if isinstance(operation, LoadWeights):
                self._computation = self._computation.with_weights(operation)
                self._is_mixed = not operation.flush_cache
            elif self._coming != self._files:
                self._is_mixed = True
            self._files = self._coming
        if self._is_mixed:
            logger.warning(
                "The cache tiers are not used: other weights were loaded without emptying the"
                " prefix cache."
            )
            return
        self.identity.begin()

    def _identity(self) -> bytes:
        """Raises CheckpointError if the files are not those any more that were loaded."""
        computation, files = self._computation, self._files
        version = self._setup.weight_version
        identity = engine_digest(rank_facts(computation, version, self._runner, self._rank))
        if computation.noted_weights() != files:
            raise CheckpointError(
                f"the files in {computation.folder} have changed since they were loaded."
            )
        return identity

    def _present_rows(self) -> PageRows:
        pool = self._runner.pool
        if self._rows is None or self._rows_of is not pool.memory:
            self._rows, self._rows_of = PageRows(pool), pool.memory
        return self._rows


def open_tiers(
    setup: TierSetup | None,
    computation: ComputationIdentity,
    runner: ModelRunner,
    others: OtherRanks | None,
    post: Callable[[PrefixFound | PagesMoved], object],
    files: Identities,
) -> CacheTiers | None:
    """The tiers of rank 0, whose ``movers`` move the shares of all ranks; None if there are none.
    Raises ConfigError."""
    if setup is None:
        return None
    ranks = None if others is None else RankedMover(others, post)
    post_own = post if ranks is None else ranks.post_own
    tiers = CacheTiers(setup, computation, runner, 0, post_own, files)
    if ranks is not None:
        ranks.lead(tiers.mover)
        tiers.movers = ranks
    return tiers


class LateTiers:
    """The tiers of a rank but the first, which are made when the rank has its pool; what happens to
    the weights before needs no notice. Implements ``Operator`` around the rank's own."""

    def __init__(
        self,
        setup: TierSetup,
        computation: ComputationIdentity,
        runner: ModelRunner,
        operator: Operator,
        rank: int,
        files: Identities,
    ) -> None:
        self._setup, self._computation = setup, computation
        self._runner, self._operator, self._rank = runner, operator, rank
        self._files = files
        self._watched: TierOperator | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._operator, name)  # what only an EngineOperator can do

    def operate(self, call_id: int, operation: Operation) -> str:
        if isinstance(operation, LoadWeights):
            self._computation = self._computation.with_weights(operation)
            self._files = self._computation.noted_weights()
        return (self._watched or self._operator).operate(call_id, operation)

    def make(self, post: Callable[[PrefixFound | PagesMoved], object]) -> Mover:
        tiers = CacheTiers(
            self._setup, self._computation, self._runner, self._rank, post, self._files
        )
        self._watched = TierOperator(self._operator, tiers)
        return tiers.mover


def rank_facts(
    computation: ComputationIdentity, weight_version: str, runner: ModelRunner, rank: int
) -> dict[str, str]:
    """Everything that decides which bits a rank writes for a token, and in which layout."""
    facts, layout, report = computation.facts(), runner.pool.layout, runner.report
    del facts["the version of Setpoint"]
    return facts | {
        "sources": sources_digest(*COMPUTING),
        "torch": str(torch.__version__),
        "weights": f"seed {computation.engine.seed}"
        if computation.is_dummy
        else weights_digest(computation.folder),
        "weight version": weight_version,
        "rank": str(rank),
        "layout": repr(layout),
        "parts": repr([part.shape[2:] for slab in runner.pool.slabs for part in slab]),
        "page size": str(runner.page_size),
        "kernels": f"{report.ops} {report.linear} {report.attention} {report.level}",
        "model": report.model_impl,
    }


def _host_bytes(options: TierOptions, pool_bytes: int) -> int:
    if options.hicache_size:
        return options.hicache_size * 10**9
    return int((2.0 if options.hicache_ratio is None else options.hicache_ratio) * pool_bytes)
