"""Everything that depends on the kind of device and is not a kernel: copies to and from it, time
marks, the memory of the KV pool, whether reading a value is free.

Apart from the registries this is the only file of the data plane that compares device kinds. Works
on tensors and host arrays; knows nothing of models, slots or plans.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from setpoint.core.errors import ConfigError
from setpoint.core.lack import Lack
from setpoint.engine.kernels.host_memory import give_back_heap

Mark = float | torch.cuda.Event

PINNED = {"cuda"}
"""Types of the devices that copy from pinned memory of the host by themselves."""


def check_device(device: torch.device) -> None:
    """Raise ConfigError if this torch cannot drive the device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = "is not set" if visible is None else f"is {visible!r}"
        raise ConfigError(
            f"--device cuda was asked for, but torch {torch.__version__} (built for CUDA"
            f" {torch.version.cuda or 'none'}) sees no CUDA device here: the driver may be older"
            f" than this torch needs (nvidia-smi tells both), and CUDA_VISIBLE_DEVICES {names}. Use"
            " --device cpu, or auto."
        )


def reading_is_free(device: torch.device) -> bool:
    """Whether the host can read a value of the device without waiting, that is, whether the device
    is the host."""
    return device.type == "cpu"


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy of a host array on the device, made without waiting for the device. On the CPU it is a
    view, so the array must not change afterwards."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return pinned(tensor, device).to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor on the CPU, complete once the device has reached this point (``wait``
    for a later mark). On the CPU it is the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The host's tensor in memory from which the device copies by itself; the same tensor for a
    device that does not."""
    return tensor.pin_memory() if device.type in PINNED else tensor


def drawn_uniformly(
    shape: tuple[int, ...], low: float, high: float, *, seed: int, device: torch.device
) -> torch.Tensor:
    """Numbers in float32, drawn on the device from a seed that no other draw uses or changes."""
    values = torch.empty(shape, dtype=torch.float32, device=device)
    if device.type == "meta":  # has no generator, and no numbers
        return values
    generator = torch.Generator(device).manual_seed(seed)
    return values.uniform_(low, high, generator=generator)


class SharedTensor:
    """A tensor that the host reads in every step without waiting for the device, and writes if it
    is on the CPU (``runner.step_block`` writes those of other devices).

    On the CPU this goes through numpy, which uses the same memory. A step without any torch
    operation avoids the hundreds of cache misses of its first one, whose code the weights have
    evicted from the caches.
    """

    __slots__ = ("_array", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._array = tensor.numpy() if tensor.device.type == "cpu" else None

    def fill(self, values: npt.NDArray[np.generic]) -> None:
        """Write ``values`` to the first elements. On the CPU only."""
        self._array[: len(values)] = values

    def put(
        self,
        rows: npt.NDArray[np.integer],
        columns: npt.NDArray[np.integer],
        values: npt.NDArray[np.integer],
    ) -> None:
        """Write ``values[i]`` to ``[rows[i], columns[i]]``. On the CPU only."""
        self._array[rows, columns] = values

    def put_tokens(
        self, rows: npt.NDArray[np.integer], columns: npt.NDArray[np.integer], tokens: SharedTensor
    ) -> None:
        """Write ``tokens[i]`` to ``[rows[i], columns[i]]``, negative ones as 0. On the CPU only."""
        self._array[rows, columns] = np.maximum(tokens._array[: len(rows)], 0)

    def fetch(self, num: int) -> npt.NDArray[np.generic]:
        """A copy of the first ``num`` elements on the host, complete once the device has reached
        this point."""
        if self._array is not None:
            return self._array[:num].copy()
        return to_host(self.tensor[:num]).numpy()


def accelerator_name(device: torch.device) -> str | None:
    """The product name of an accelerator; None for the processor itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def compute_capability(device: torch.device) -> int:
    """Compute capability of an NVIDIA GPU, times ten; 0 for another device."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def marker(device: torch.device) -> Callable[[], Mark]:
    """A function that marks the present point of the device's work: with the time on the CPU, with
    an event on a GPU."""
    return _event if device.type == "cuda" else time.perf_counter


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@contextlib.contextmanager
def beside_steps(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    """A block whose work a GPU does beside the steps, on ``stream``, once it has done what had been
    enqueued for the steps before."""
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A queue of a GPU's work beside that of the steps."""
    return torch.cuda.Stream(device)


def wait(point: Mark) -> None:
    """Wait until the device has reached this mark."""
    if not isinstance(point, float):
        point.synchronize()


def seconds_between(begin: Mark, end: Mark) -> float:
    """Seconds of device time between two marks, both of which must have been reached."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


def traced(device: torch.device, *, host: bool, device_too: bool) -> tuple[bool, str | None]:
    """What is wanted and torch's profiler can trace here: whether the host, and which device."""
    return host, "cuda" if device_too and device.type == "cuda" else None


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def give_back(device: torch.device) -> None:
    """Give the memory back to the system that torch or the C library keeps for later use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_heap()


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int | None:
    """The most memory that tensors took while ``run`` ran on a GPU, in addition to what they took
    before; None on a device that has no memory, for which kernels are compiled."""
    if device.type != "cuda":
        run()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return int(torch.cuda.max_memory_allocated(device)) - before


_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def lack_of(error: torch.OutOfMemoryError, device: torch.device) -> Lack:
    """What is known of a failed allocation. It holds nothing of the exception, whose traceback
    holds tensors."""
    text = str(error).partition("\n")[0]
    tried = _TRIED.search(text)
    why = text.partition(" Including ")[0].rstrip(".") or "out of memory"
    wanted = round(float(tried[1]) * _UNITS[tried[2]]) if tried else 0
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    return Lack(why, wanted, int(total))


def claims_later(device: torch.device) -> bool:
    """Whether ``claim`` only maps the memory, which is then claimed as it is written."""
    return device.type == "cpu"


def claim(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for the KV pool. Raises RuntimeError if there is not enough.

    On a CPU it is only mapped here and claimed as tokens arrive: writing gigabytes first would take
    most of the start-up time, and the memory plan has already counted them. On a GPU an allocation
    claims the memory at once.
    """
    return (
        torch.empty(shape, dtype=dtype)
        if claims_later(device)
        else torch.zeros(shape, dtype=dtype, device=device)
    )
