"""Tables of implementations, and the choice of the best one that runs here.

Every interface of the engine with several implementations (operations here, attention, linear
methods) keeps a table "name" -> "module:attr" of factories and a preference per device kind. A
factory raises KernelsUnavailable with the reason when its implementation cannot run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from setpoint.core.errors import ConfigError
from setpoint.engine.kernels.ops import KernelsUnavailable, Ops
from setpoint.engine.kernels.program import Recorder

T = TypeVar("T")

OPS = {
    "ref": "setpoint.engine.kernels.ref:create",
    "cpu": "setpoint.engine.kernels.cpu.ops:create",
    "triton": "setpoint.engine.kernels.triton.ops:create",
}
"""Name -> factory ``create(dtype) -> Ops``."""

PREFERENCE = {"cpu": ("cpu", "ref"), "cuda": ("triton", "ref")}
"""Device type -> names, best first; the last one runs everywhere."""

RECORDERS = {"cpu": "setpoint.engine.kernels.cpu.capture:create"}
"""Device type -> factory ``create() -> Recorder`` of captured steps, for devices that have one."""


@dataclass(slots=True, frozen=True)
class ChosenKernel(Generic[T]):
    name: str
    impl: T
    fallback: str = ""
    """Why the better implementations cannot run, for the log; empty if the first choice runs."""


def choose(table: Mapping[str, str], names: Iterable[str], *args: Any) -> ChosenKernel[Any]:
    """The first of ``names`` whose factory accepts ``args``. Raises ConfigError with all reasons if
    none does."""
    reasons = []
    for name in names:
        try:
            impl = resolve(table[name])(*args)
        except KernelsUnavailable as reason:
            reasons.append(f"{name}: {reason}")
        else:
            return ChosenKernel(name, impl, "; ".join(reasons))
    raise ConfigError(f"Cannot run here: {'; '.join(reasons)}.")


def resolve(target: str) -> Any:
    """The object that the entry ``"module:attr"`` names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def make_recorder(device: torch.device) -> Recorder:
    """A recorder of steps on this device. Raises KernelsUnavailable with the reason if steps cannot
    be captured there."""
    if device.type not in RECORDERS:
        raise KernelsUnavailable(f"no step can be captured on {device.type}")
    return resolve(RECORDERS[device.type])()


def choose_ops(device: torch.device, dtype: torch.dtype) -> ChosenKernel[Ops]:
    """The best operations for this device and dtype."""
    return choose(OPS, PREFERENCE[device.type], dtype)
