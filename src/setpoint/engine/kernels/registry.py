"""Which implementation of the operations runs on which device: the only place that decides."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch

from setpoint.engine.kernels.ops import KernelsUnavailable, Ops

OPS = {
    "cpu": "setpoint.engine.kernels.cpu:create",
    "ref": "setpoint.engine.kernels.ref:create",
}
"""Name -> factory ``create(dtype) -> Ops``; it raises KernelsUnavailable with the reason when it cannot run here."""

PREFERENCE = {"cpu": ("cpu", "ref"), "cuda": ("ref",)}
"""Device type -> names, best first; the last one runs everywhere."""


@dataclass(slots=True, frozen=True)
class OpsChoice:
    name: str
    ops: Ops
    fallback: str = ""
    """Why the better ones were passed over; empty when the first choice runs."""


def choose_ops(device_type: str, dtype: torch.dtype) -> OpsChoice:
    """The best operations that run on this device with this dtype, and why not a better one."""
    reasons = []
    for name in PREFERENCE[device_type]:
        try:
            ops = resolve(OPS[name])(dtype)
        except KernelsUnavailable as reason:
            reasons.append(f"{name}: {reason}")
        else:
            return OpsChoice(name, ops, "; ".join(reasons))
    raise AssertionError("the reference operations run everywhere")


def resolve(target: str):  # noqa: ANN201 - whatever the table names
    """The object that a ``"module:attr"`` entry names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
