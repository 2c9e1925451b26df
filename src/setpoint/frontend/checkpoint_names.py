"""The protocol that finds the folder of a checkpoint which a client names. ``launch`` decides what
may be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from setpoint.core.errors import RequestError


@dataclass(slots=True, frozen=True)
class Checkpoint:
    folder: str
    load_format: str


class Checkpoints(Protocol):
    def find(self, model_path: str, load_format: str | None) -> Checkpoint:
        """The checkpoint for the running model that a client names; may read its config.json.
        Raises RequestError (400, 403) if it may not be read, is none, or has other shapes than the
        model."""
        ...

    def license(self) -> str:
        """The text of the served model's license, or its name; "" if its files have neither."""
        ...


class NoCheckpoints:
    """The names of a service whose engine loads no other weights: none."""

    def find(self, model_path: str, load_format: str | None) -> Checkpoint:
        raise RequestError("This server cannot load other weights.")

    def license(self) -> str:
        return ""
