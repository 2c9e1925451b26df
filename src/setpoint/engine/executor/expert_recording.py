"""Records how many tokens experts get between two moments, for a file that --init-expert-location
reads (SGLang's recorder of the expert distribution)."""

from __future__ import annotations

import json
from pathlib import Path

from setpoint.core.errors import RequestError
from setpoint.core.expert_placement import COUNT, Loads
from setpoint.core.operations import RecordExperts
from setpoint.engine.parallel.split import mixtures
from setpoint.engine.runner.model_runner import ModelRunner


class ExpertRecorder:
    """At most one record at a time."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._begin: list[Loads] | None = None
        """The counts at the start, by layer with experts; None: there is no record."""
        self._end: list[Loads] | None = None
        """The counts at the stop."""

    def operate(self, operation: RecordExperts) -> str:
        """Returns the path of the file of a dump, or "". Raises RequestError."""
        now = self._counts()
        match operation.action:
            case "start":
                self._begin, self._end = now, None
            case "stop":
                self._of(now)
                self._end = now
            case "dump":
                self._write(Path(operation.path), self._of(self._end or now))
                self._begin = self._end = None
        return operation.path

    def _counts(self) -> list[Loads]:
        model = self._runner.model
        if self._runner.spec.mixture is None:
            raise RequestError("This model has no experts.")
        if model is None:
            raise RequestError("The weights, and the experts with them, are released.")
        found = mixtures(model)
        return [mixture.expert_slots.expert_load() for mixture in found]

    def _of(self, end: list[Loads]) -> list[list[int]]:
        """The tokens of each expert of each layer from the start to ``end``."""
        if self._begin is None:
            raise RequestError(
                "No record of experts is running: start one (/start_expert_distribution_record). A"
                " dump ends the record."
            )
        found = [(b - a).tolist() for a, b in zip(self._begin, end, strict=True)]
        if min(map(min, found)) < 0:
            raise RequestError("The weights were replaced during the record; start another one.")
        return found

    def _write(self, path: Path, counts: list[list[int]]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x") as file:
                json.dump({COUNT: counts}, file)
        except OSError as error:
            raise RequestError(f"Cannot write {path}: {error.strerror}.") from None
