"""Captured steps on CPUs (``kernels.program``): the list of kernel calls that a forward pass makes,
run by program.cpp.

Every kernel is one C function with one struct (``library.KERNELS``). While a step is recorded, the
bindings' calls end here: the struct is copied, and nothing runs. No other computation may go
unnoticed, so a dispatch mode sees every torch operation, serves allocations from the program's own
memory, lets views pass and refuses everything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from setpoint.engine.kernels.cpu.calls import ProgramCall, ProgramOp
from setpoint.engine.kernels.cpu.library import KERNELS, Kernels, load
from setpoint.engine.kernels.host_memory import in_huge_pages
from setpoint.engine.kernels.program import KINDS, NotCapturable

COUNTS = ("tokens", "sequences", "samples", "gathered")
ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
)


class Arena:
    """Memory of a program's tensors. A block is reused once the last reference to the tensor on it
    is gone."""

    def __init__(self) -> None:
        self.memory: list[np.ndarray] = []
        self.peak_bytes = 0
        """Most bytes that were in use at the same time."""
        self._used_bytes = 0
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        """Size in bytes -> free blocks."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = max(1, dtype.itemsize * int(np.prod(shape)))
        free = self._free[size]
        block = free.pop() if free else self._new(size)
        view = block[:]
        weakref.finalize(view, self._give_back, block)
        self._used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)
        return torch.from_numpy(view).view(dtype)[: int(np.prod(shape))].view(shape)

    def _give_back(self, block: np.ndarray) -> None:
        self._free[block.nbytes].append(block)
        self._used_bytes -= block.nbytes

    def _new(self, size: int) -> np.ndarray:
        memory = in_huge_pages((size,), torch.uint8).numpy()
        self.memory.append(memory)
        return memory


class _OperationGuard(TorchDispatchMode):
    """Handles every torch operation during a recording: allocates, lets views pass, refuses the
    rest."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks every mode. The default answer (True) would import torch's compiler, which
        takes a second and 60 MB that are never freed."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ALLOCATIONS:
            like = args[0] if isinstance(args[0], torch.Tensor) else None
            shape = (
                args[1] if func is ALLOCATIONS[2] else like.shape if like is not None else args[0]
            )
            dtype = kwargs.get("dtype") or (
                torch.get_default_dtype() if like is None else like.dtype
            )
            return self._arena.empty(tuple(shape), dtype)
        if func.is_view:
            return func(*args, **kwargs)
        with self:  # composite operations arrive whole in inference mode
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise NotCapturable(
                f"the forward pass calls torch's {func.name()}, which cannot be captured"
            )
        return result


@dataclass(slots=True)
class RecordedCall:
    kernel: int
    """Address of the C function."""
    call: ctypes.Structure
    counts: str
    """The count of which ``call.rows`` is a multiple: one of COUNTS."""
    kind: str
    """One of ``kernels.program.KINDS``."""


class CpuRecorder:
    """Implements ``kernels.program.Recorder``."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._arena = Arena()
        self._calls: list[RecordedCall] = []

    @property
    def peak_bytes(self) -> int:
        return self._arena.peak_bytes

    @contextlib.contextmanager
    def recording(self, rows: str = "tokens", *, products: str = "linear") -> Iterator[None]:
        def record(name: str, address: int) -> None:
            nonlocal rows
            kernel = KERNELS[name]
            rows = kernel.turns_to or rows
            call = kernel.call.from_buffer_copy(
                ctypes.string_at(address, ctypes.sizeof(kernel.call))
            )
            counts = rows if kernel.counts == "tokens" else kernel.counts
            self._calls.append(
                RecordedCall(
                    self._kernels.address(name),
                    call,
                    counts,
                    products if kernel.kind == "linear" else kernel.kind,
                )
            )

        before = len(self._calls)
        try:
            with self._kernels.recorded_by(record), _OperationGuard(self._arena):
                yield
        except NotCapturable:
            del self._calls[before:]
            raise

    def program(self, *, tokens: int, sequences: int, samples: int, gathered: int) -> CpuProgram:
        counts = (tokens, sequences, samples, gathered)
        return CpuProgram(self._kernels, self._calls, counts, self._arena)


class CpuProgram:
    """Implements ``kernels.program.Program``."""

    def __init__(
        self, kernels: Kernels, calls: list[RecordedCall], counts: Sequence[int], arena: Arena
    ) -> None:
        self.num_bytes = sum(memory.nbytes for memory in arena.memory)
        self._run = kernels.program
        self._held = (calls, arena)
        """The calls and the memory that the operations point to."""
        self._ops = (ProgramOp * len(calls))(*(_op(call, counts) for call in calls))
        self._counts = (ctypes.c_int64 * len(COUNTS))()
        self._nanoseconds = (ctypes.c_int64 * len(KINDS))()
        self._call = ProgramCall(
            ops=ctypes.addressof(self._ops),
            counts=ctypes.addressof(self._counts),
            num_ops=len(calls),
            threads=torch.get_num_threads(),
        )
        self._address = ctypes.addressof(self._call)

    def run(self, *, tokens: int, sequences: int, samples: int, gathered: int) -> None:
        self._counts[:] = (tokens, sequences, samples, gathered)
        self._run(self._address)

    def start_timing(self) -> None:
        self._call.nanoseconds = ctypes.addressof(self._nanoseconds)

    def take_times(self) -> dict[str, float]:
        times = {
            kind: nanoseconds / 1e9
            for kind, nanoseconds in zip(KINDS, self._nanoseconds, strict=True)
        }
        ctypes.memset(self._nanoseconds, 0, ctypes.sizeof(self._nanoseconds))
        return times


def _op(recorded: RecordedCall, counts: Sequence[int]) -> ProgramOp:
    which = COUNTS.index(recorded.counts)
    per_count, rest = divmod(recorded.call.rows, counts[which])
    assert rest == 0, f"{recorded.call.rows} rows in a step of {counts[which]} {recorded.counts}"
    return ProgramOp(
        kernel=recorded.kernel,
        call=ctypes.addressof(recorded.call),
        rows=ctypes.addressof(recorded.call) + type(recorded.call).rows.offset,
        per_count=per_count,
        counts=which,
        kind=KINDS.index(recorded.kind),
    )


def create() -> CpuRecorder:
    """A recorder of the kernels that the other factories use. Raises KernelsUnavailable with the
    reason if there are none."""
    return CpuRecorder(load())
