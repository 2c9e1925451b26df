"""A GPU that is not there: Triton compiles for it, and nothing is launched.

The host code that drives a GPU runs as it is, on torch's meta device: its tensors have shapes,
strides and offsets, which with their dtypes are all that a variant of a kernel depends on. So
Triton compiles what it would compile on the GPU, and keeps it in the same folder under the same
names. A process that interprets kernels cannot use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""Compute capability -> most shared memory of a block (CUDA C++ Programming Guide, table of
technical specifications)."""
VERSION: str = triton.__version__
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
"""Compute capability -> multiprocessors of an A100, an H100 and a B200. They size grids, for which
nothing is compiled."""


def kernels_folder() -> Path:
    """The folder in which Triton keeps what it compiles."""
    return Path(triton.knobs.cache.dir)


@dataclass(slots=True, frozen=True)
class Variant:
    """A kernel for one set of dtypes, constants and alignments."""

    kernel: str
    seconds: float
    """How long compiling it took, or reading it."""
    is_known: bool
    """Whether Triton's folder had it."""


class AbsentGpu:
    """Stands in for Triton's driver of NVIDIA GPUs; ``install`` puts it in place."""

    def __init__(self, capability: int) -> None:
        """capability: one of SHARED_BYTES, for sm_80, sm_90a or sm_100a."""
        self._capability = capability
        gpu = self

        class Launcher:
            def __init__(self, source: Any, metadata: Any) -> None:
                self.name = metadata.name

            def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
                gpu.launched(self.name, (x, y, z))

        self.launcher_cls = Launcher
        self.utils = self

    def install(self, tell: Callable[[Variant], None] | None = None) -> None:
        """tell: is called for each variant that is compiled, or read because Triton's folder has
        it."""
        triton.runtime.driver.set_active(self)
        if tell is not None:

            def compiled(*, metadata: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
                tell(Variant(metadata["name"], times.total / 1e6, cache_hit))

            triton.knobs.compilation.listener = compiled

    def launched(self, kernel: str, grid: tuple[int, int, int]) -> None:
        """A kernel would have been launched."""

    def loaded(self, kernel: str, binary: bytes, shared_bytes: int) -> None:
        """A variant's machine code would have been loaded, before its first launch."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        self.loaded(name, binary, shared)
        return object(), object(), 0, 0, 1024

    def unload_module(self, module: object) -> None:
        """There is nothing to unload."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_BYTES[self._capability],
            "multiprocessor_count": MULTIPROCESSORS[self._capability],
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name
