"""Defines the result of ``configuration.settle``, from which the rest of the start is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from setpoint.checkpoint.source import ModelSource
from setpoint.config.live_changes import ConfigInputs
from setpoint.config.pool import memory_model
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.model import ModelSpec
from setpoint.core.operations import StorageOrder
from setpoint.frontend.checkpoint_names import Checkpoint
from setpoint.launch.job import EngineJob


@dataclass(slots=True, frozen=True)
class MachineShare:
    """How several models share the machine."""

    max_loaded: int
    """How many are loaded at the same time; each has an equal share of memory and cores."""
    weights_folder: str
    """See ``EngineJob``."""
    before: tuple[str, ...] = ()
    """The names of the models that are loaded before this one at the start."""


@dataclass(slots=True, frozen=True)
class ServedModel:
    """What is served and how. All engines use this record, and none looks anything up again."""

    source: ModelSource
    """The model's folder, and what its small files say."""
    tokenizer: Path | None
    """The folder of the tokenizer; None with --skip-tokenizer-init."""
    template: str | None
    """The source of the chat template; None if the model has none."""
    asked: ConfigInputs
    """The inputs of ``config``, the options as the user gave them among them. A change of live
    options resolves them again."""
    config: ResolvedConfig
    """The options as resolved."""
    sampling: Mapping[str, float]
    """The sampling parameters that the model's authors recommend, if they are to be used."""
    tells_prefixes: bool = False
    """Whether the engines report which prefixes their caches hold, so that the choice of an engine
    can use it."""
    handover_key: str = ""
    """See ``EngineJob``."""
    share: MachineShare | None = None
    """How the model shares the machine with others; None: it is the only one."""

    @property
    def spec(self) -> ModelSpec:
        return self.asked.model

    @property
    def shared_name(self) -> str:
        """The name by which requests and the log tell the model from the server's others; "" if it
        is the only one."""
        return "" if self.share is None else self.config.options.model.served_model_name or ""

    @property
    def num_engines(self) -> int:
        return self.config.options.parallel.dp_size

    def job(
        self,
        *,
        rank: int = 0,
        life: int = 0,
        config: ResolvedConfig | None = None,
        checkpoint: Checkpoint | None = None,
        is_standby: bool = False,
        storage: StorageOrder | None = None,
    ) -> EngineJob:
        """The job of one engine. life: how many engines its rank has had before; each records to a
        folder of its own. config, checkpoint: the configuration and the weights, if they have
        changed since the start. is_standby: another engine serves meanwhile. storage: see
        EngineJob."""
        several, config = self.num_engines > 1, config or self.config
        record = config.options.recording.record
        if record is not None and (several or life):
            record += f"-dp{rank}" * several + f"-{life + 1}" * (life > 0)
            config = replace(config, options=config.options.replace(record=record))
        if checkpoint is not None:
            options = config.options.replace(load_format=checkpoint.load_format)
            config = replace(config, options=options)
        return EngineJob(
            config,
            self.spec,
            str(self.source.folder) if checkpoint is None else checkpoint.folder,
            None if self.tokenizer is None else str(self.tokenizer),
            rank if several else None,
            self._memory_bytes,
            self.tells_prefixes,
            self.handover_key,
            is_standby,
            "" if self.share is None else self.share.weights_folder,
            storage,
            is_restart=life > 0,
        )

    @property
    def _memory_bytes(self) -> int | None:
        """The maximum memory that each engine may use; None: all that is free."""
        available = self.asked.hardware.available_bytes
        if self.config.options.parallel.engine_standby:  # two have weights, and one fills its pool
            return available - memory_model(self.config, self.spec).weights()
        return available if self.num_engines > 1 or self.share is not None else None
