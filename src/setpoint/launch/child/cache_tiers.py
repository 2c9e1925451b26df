"""Builds the cache tiers of a rank: opens the stores, and finds out which engine this is, so that
blocks are shared by engines that compute the same bits and by no others."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

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
from setpoint.core.messages import Found, Moved
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
from setpoint.core.weightfiles import Identities, identities, weight_files
from setpoint.engine.executor.rank_moves import RankedMover
from setpoint.engine.executor.tensor_parallel import OtherRanks
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.engine.runner.page_rows import PageRows
from setpoint.launch.child.agreement import facts_of
from setpoint.launch.child.recognition import Recognition, WatchedOperator
from setpoint.launch.child.storages import Opener
from setpoint.launch.job import EngineJob, with_weights
from setpoint.launch.settings import tier_config
from setpoint.scheduler.tiers import Tiers, TierTotals
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


class CacheTiers:
    """The tiers of one rank."""

    def __init__(
        self,
        job: EngineJob,
        runner: ModelRunner,
        rank: int,
        post: Callable[[Found | Moved], object],
        files: Identities,
    ) -> None:
        """files: ``noted_weights`` from before the weights were loaded. Raises ConfigError if the
        storage cannot be used."""
        options = job.config.options
        config = tier_config(options)
        assert config is not None
        self._job, self._runner, self._rank = job, runner, rank
        self._block, self._began = config.block, time.monotonic()
        self._rows: PageRows | None = None
        self._rows_of: object = None
        self.backend = options.tiers.hicache_storage_backend
        self._start_config = storage_config(options.tiers)
        tiers = []
        if options.execution.device != "cpu":
            tiers.append(Tier(HOST, MemoryStore(_host_bytes(job, runner))))
        if job.storage is not None:
            tiers += self._ordered_storage(job.storage)
        elif self.backend is not None:
            tiers.append(self._first_storage(self.backend, self._start_config))
        self.mover = StoreMover(
            tiers,
            self._present_rows,
            block=config.block,
            page_size=options.memory.page_size,
            post=post,
        )
        self.movers: Mover = self.mover
        """What the scheduler calls: on several ranks, it moves the shares of all."""
        self._files = self._coming = files
        """The files of the weights, as they were when these were loaded, or will have been."""
        self._is_mixed = False
        """Whether the prefix cache may have pages of earlier weights."""
        self.recognition = Recognition(self.mover.serve_as, self._identity)
        self.recognition.begin()

    @property
    def storage(self) -> Tier | None:
        return next((tier for tier in self.mover.tiers if tier.name == STORAGE), None)

    def _first_storage(self, backend: str, config: StorageConfig) -> Tier:
        """The storage that was asked for at the start. Raises ConfigError if it cannot be used."""
        try:
            return self.open_storage(backend, config)
        except StoreError as error:
            raise ConfigError(f"--hicache-storage-backend {backend}: {error}") from None

    def _ordered_storage(self, order: StorageOrder) -> list[Tier]:
        """The storage that operators have attached before this engine was started, or none;
        switched off if it cannot be used, because the engine can do without."""
        if isinstance(order, DetachStorage):
            return []
        self.backend = order.backend
        try:
            return [self.open_storage(order.backend, self._asked_for(order))]
        except (ConfigError, StoreError) as error:
            logger.error("The storage %s cannot be attached again: %s", order.backend, error)
            tier = Tier(STORAGE, MemoryStore(0))
            tier.switch_off(str(error))
            return [tier]

    def open_storage(self, backend: str, config: StorageConfig) -> Tier:
        """Open the store of a backend. Raises StoreError."""
        job = self._job
        opener = Opener(
            env=job.config.env,
            owner=hashlib.sha256(f"{job.folder} {self._rank}".encode()).digest(),
            block_bytes=block_bytes(
                self._present_rows(), self._block, job.config.options.memory.page_size
            ),
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
            is_thrifty=tiers is not None and tiers.is_thrifty,
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
            if getattr(config, name) != getattr(self._start_config, name):
                raise ConfigError(
                    f"{name} is {getattr(self._start_config, name)} as long as this server runs; it"
                    " can be given at the start."
                )
        return config

    def before(self, operation: LoadWeights | RestoreMemory) -> None:
        self.recognition.forget()
        job = self._job
        if isinstance(operation, LoadWeights):
            job = with_weights(job, operation)
        self._coming = noted_weights(job)

    def after(self, operation: LoadWeights | RestoreMemory, error: Exception | None) -> None:
        if error is not None and not isinstance(error, SetpointError):
            logger.warning("The cache tiers are not used: it is not known which weights are there.")
            return
        if error is None:
            if isinstance(operation, LoadWeights):
                self._job = with_weights(self._job, operation)
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
        self.recognition.begin()

    def _identity(self) -> bytes:
        """Raises CheckpointError if the files are not those any more that were loaded."""
        job, files = self._job, self._files
        identity = engine_digest(engine_facts(job, self._runner, self._rank))
        if noted_weights(job) != files:
            raise CheckpointError(f"the files in {job.folder} have changed since they were loaded.")
        return identity

    def _present_rows(self) -> PageRows:
        pool = self._runner.pool
        if self._rows is None or self._rows_of is not pool.memory:
            self._rows, self._rows_of = PageRows(pool), pool.memory
        return self._rows


def open_tiers(
    job: EngineJob,
    runner: ModelRunner,
    others: OtherRanks | None,
    post: Callable[[Found | Moved], object],
    files: Identities,
) -> CacheTiers:
    """The tiers of rank 0, whose ``movers`` move the shares of all ranks. Raises ConfigError."""
    if others is None:
        return CacheTiers(job, runner, 0, post, files)
    ranks = RankedMover(others, post)
    tiers = CacheTiers(job, runner, 0, ranks.post_own, files)
    ranks.lead(tiers.mover)
    tiers.movers = ranks
    return tiers


class LateTiers:
    """The tiers of a rank but the first, which are made when the rank has its pool; what happens to
    the weights before needs no notice. Implements ``Operator`` around the rank's own."""

    def __init__(
        self,
        job: EngineJob,
        runner: ModelRunner,
        operator: Operator,
        rank: int,
        files: Identities,
    ) -> None:
        self._job, self._runner, self._operator, self._rank = job, runner, operator, rank
        self._files = files
        self._watched: WatchedOperator | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._operator, name)  # what only an EngineOperator can do

    def operate(self, call_id: int, operation: Operation) -> str:
        if isinstance(operation, LoadWeights):
            self._job = with_weights(self._job, operation)
            self._files = noted_weights(self._job)
        return (self._watched or self._operator).operate(call_id, operation)

    def make(self, post: Callable[[Found | Moved], object]) -> Mover:
        tiers = CacheTiers(self._job, self._runner, self._rank, post, self._files)
        self._watched = WatchedOperator(self._operator, tiers)
        return tiers.mover


def noted_weights(job: EngineJob) -> Identities:
    """The state of the weights' files now. What is read from a GGUF file is guarded by its
    digest."""
    if job.config.options.model.load_format == "dummy":
        return {}
    try:
        return identities(weight_files(Path(job.folder)))
    except (SetpointError, OSError):
        return {}  # who loads them says what is wrong


def engine_facts(job: EngineJob, runner: ModelRunner, rank: int) -> dict[str, str]:
    """Everything that decides which bits a rank writes for a token, and in which layout."""
    facts, layout, report = facts_of(job), runner.pool.layout, runner.report
    del facts["the version of Setpoint"]
    return facts | {
        "sources": sources_digest(*COMPUTING),
        "torch": str(torch.__version__),
        "weights": f"seed {job.config.random_seed}"
        if job.config.options.model.load_format == "dummy"
        else weights_digest(Path(job.folder)),
        "weight version": str(job.config.options.model.weight_version),
        "rank": str(rank),
        "layout": repr(layout),
        "parts": repr([part.shape[2:] for slab in runner.pool.slabs for part in slab]),
        "page size": str(runner.page_size),
        "kernels": f"{report.ops} {report.linear} {report.attention} {report.level}",
        "model": report.model_impl,
    }


def _host_bytes(job: EngineJob, runner: ModelRunner) -> int:
    tiers = job.config.options.tiers
    if tiers.hicache_size:
        return tiers.hicache_size * 10**9
    return int(
        (2.0 if tiers.hicache_ratio is None else tiers.hicache_ratio) * runner.pool.num_bytes
    )
