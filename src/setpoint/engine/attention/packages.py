"""Libraries whose kernels an attention backend calls: whether the known version of one is installed
and runs on this GPU.

A backend is written against the signatures of one series of versions, and another one is refused:
a parameter that has changed its meaning would give wrong answers, not errors.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

from setpoint.engine.attention.attention_backend import AttentionShape
from setpoint.engine.kernels.ops import KernelsUnavailable

INSTEAD = "triton needs no package"


@dataclass(slots=True, frozen=True)
class Package:
    """A package as pip knows it, and the versions that are known: from ``least`` on, and lower than
    ``below``."""

    distribution: str
    module: str
    least: str
    below: str

    def load(self) -> ModuleType:
        """Import the module. Raises KernelsUnavailable with the reason if it cannot be used."""
        known = f"{self.distribution}>={self.least},<{self.below}"
        try:
            version = metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            raise KernelsUnavailable(
                f"the package {self.distribution} is not installed (known are {known}); {INSTEAD}"
            ) from None
        if not _numbers(self.least) <= _numbers(version) < _numbers(self.below):
            raise KernelsUnavailable(
                f"{self.distribution} {version} is installed, and only {known} is known; {INSTEAD}"
            )
        try:
            return importlib.import_module(self.module)
        except (ImportError, OSError, RuntimeError) as error:  # for another torch or CUDA
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise KernelsUnavailable(
                f"{self.distribution} {version} cannot be imported ({first}); {INSTEAD}"
            ) from error


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def require_plain(shape: AttentionShape) -> None:
    """Raise KernelsUnavailable for latent attention, whose V is a part of K."""
    if shape.value_dim != shape.head_dim:
        raise KernelsUnavailable(
            f"latent attention (K of {shape.head_dim} numbers, V of {shape.value_dim}) is not"
            f" adapted; {INSTEAD}"
        )
