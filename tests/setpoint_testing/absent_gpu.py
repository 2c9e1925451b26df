"""A GPU that is not there: Triton compiles for it, and launches are recorded instead of made.

The host code that drives a GPU runs as it is, on torch's meta device. What it would launch is
compiled to machine code and noted in order, and what each kernel needs is read from its machine
code. A process that interprets kernels (``interpreted_triton``) cannot use it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""Compute capability -> most shared memory of a block (CUDA C++ Programming Guide, table of
technical specifications)."""
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}


@dataclass(slots=True, frozen=True)
class Needs:
    """What a compiled kernel needs."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


@dataclass(slots=True, frozen=True)
class Launch:
    kernel: str
    grid: tuple[int, int, int]


class AbsentGpu:
    """Stands in for Triton's driver of NVIDIA GPUs; ``install`` puts it in place."""

    def __init__(self, capability: int) -> None:
        """capability: 80, 90 or 100, for sm_80, sm_90a or sm_100a."""
        self.launches: list[Launch] = []
        self.needs: dict[str, list[Needs]] = {}
        """Kernel -> what each of its variants needs, in the order in which they were compiled."""
        self._capability = capability
        gpu = self

        class Launcher:
            def __init__(self, source: Any, metadata: Any) -> None:
                self.name = metadata.name

            def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
                gpu.launches.append(Launch(self.name, (x, y, z)))

        self.launcher_cls = Launcher
        self.utils = self

    def install(self) -> None:
        triton.runtime.driver.set_active(self)

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        registers, spilled = machine_code_needs(binary)
        self.needs.setdefault(name, []).append(Needs(registers, spilled, shared))
        return object(), object(), registers, spilled, 1024

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


def without_interpreter(module: Sequence[str], cache: Path) -> str:
    """The output of a module of the tests, with its arguments, in a process that compiles kernels and
    keeps them in ``cache``. A process that interprets kernels can compile none."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", *module],
        env=given | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def machine_code_needs(binary: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes that it spills)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])
