"""What depends on the kind of device and is no kernel: copies to it and from it, time marks, whether a look is free.

Beside the registries and ``memory`` the only file of the data plane that compares device kinds. Works on tensors and host arrays; knows
nothing of models, slots or plans.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch

from setpoint.core.errors import ConfigError

Mark = float | torch.cuda.Event


def check_device(device: torch.device) -> None:
    """Raise ConfigError if this torch cannot drive the device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, but torch sees no CUDA device here; use --device cpu, or auto.")


def reading_is_free(device: torch.device) -> bool:
    """Whether the host may read a value of the device without waiting: only if the device is the host."""
    return device.type == "cpu"


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A host array on the device, without waiting for it; on the CPU a view, so the array must not change afterwards."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU once the device has come this far (``wait`` for a later mark); on the CPU the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def mark(device: torch.device) -> Mark:
    """This point of the device's work: when the host comes here, or when the device will."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def wait(point: Mark) -> None:
    """Until the device has come to this point."""
    if not isinstance(point, float):
        point.synchronize()


def seconds_between(begin: Mark, end: Mark) -> float:
    """Of device time; both points must have been reached."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3
