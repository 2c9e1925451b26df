"""An absent GPU (``kernels.triton.absent_gpu``) that notes what would be launched, in order, and what
each kernel needs, which is read from its machine code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

from setpoint.engine.kernels.triton.absent_gpu import AbsentGpu

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


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


class NotingGpu(AbsentGpu):
    def __init__(self, capability: int) -> None:
        super().__init__(capability)
        self.launches: list[Launch] = []
        self.needs: dict[str, list[Needs]] = {}
        """Kernel -> what each of its variants needs, in the order in which they were compiled."""

    def launched(self, kernel: str, grid: tuple[int, int, int]) -> None:
        self.launches.append(Launch(kernel, grid))

    def loaded(self, kernel: str, binary: bytes, shared_bytes: int) -> None:
        needs = Needs(*machine_code_needs(binary), shared_bytes)
        self.needs.setdefault(kernel, []).append(needs)


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
