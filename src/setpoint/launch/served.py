"""The result of ``configuration.settle``, from which everything after it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from setpoint.checkpoint.source import ModelSource
from setpoint.config.live import Asked
from setpoint.config.resolved import ResolvedConfig
from setpoint.core.model import ModelSpec
from setpoint.launch.job import EngineJob


@dataclass(slots=True, frozen=True)
class Served:
    """What is served and how. All engines use this record, and none looks anything up again."""

    source: ModelSource
    """The model's folder, and what its small files say."""
    tokenizer: Path | None
    """The folder of the tokenizer; None with --skip-tokenizer-init."""
    template: str | None
    """The source of the chat template; None if the model has none."""
    asked: Asked
    """The inputs of ``config``, the options as the user gave them among them. A change of live
    options resolves them again."""
    config: ResolvedConfig
    """The options as resolved."""
    sampling: Mapping[str, float]
    """The sampling that the model's authors recommend, if that was asked for."""

    @property
    def spec(self) -> ModelSpec:
        return self.asked.model

    def job(self, link: int) -> EngineJob:
        """The job of one engine. link: the descriptor of its end of the link."""
        tokenizer = None if self.tokenizer is None else str(self.tokenizer)
        return EngineJob(self.config, self.spec, str(self.source.folder), tokenizer, link)
