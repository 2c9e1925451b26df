"""Loads the compiled kernels and binds their C entry points: levels, threads, struct layouts.

Works on raw addresses; its callers check tensors before they call. Knows nothing of what is
computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from setpoint.engine.kernels.cpu import build, probe
from setpoint.engine.kernels.cpu.calls import (
    AttentionCall,
    BestCall,
    BlockRowsCall,
    CombineCall,
    EmbeddingCall,
    ExpertsCall,
    GatedCall,
    GatherCall,
    GatherRowsCall,
    GatherTokensCall,
    HeadsCall,
    Int8LinearCall,
    LatentRopeCall,
    LinearCall,
    MaskCall,
    NormCall,
    OwnIdsCall,
    OwnTokensCall,
    PlaceCall,
    PlaceExpertsCall,
    RopeCall,
    RouteCall,
    SoftCapCall,
    TopCall,
    difference,
)
from setpoint.engine.kernels.cpu.choices import TunedProduct, choose, implementations
from setpoint.engine.kernels.cpu.openmp import share_openmp
from setpoint.engine.kernels.ops import KernelsUnavailable

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Dtype that the kernels compute in -> its number in C++ (simd.h, DType)."""

KV_DTYPES = {**DTYPES, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
"""Dtype that a KV cache may have -> its number in C++."""

_pointer, _i64, _i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


@dataclass(slots=True, frozen=True)
class Kernel:
    """One C function, ``void setpoint_<name>(const Call*)``. Its struct must have a field ``rows``
    (int64), the only number in it that depends on the size of the step; apart from addresses, the
    other fields are constants of the layer."""

    call: type[ctypes.Structure]
    kind: str
    """The kind under which its time is counted (``kernels.program.KINDS``)."""
    counts: str = "tokens"
    """The count of which ``rows`` is a multiple: the step's "tokens" or its "sequences"."""
    turns_to: str = ""
    """What takes the place of "tokens" from this kernel on: the "gathered" tokens of ranks that
    each have their own, or "tokens" again; "" changes nothing."""


KERNELS = {
    "attention_plan": Kernel(AttentionCall, "attention", "sequences"),
    "attention": Kernel(AttentionCall, "attention", "sequences"),
    "best_tokens": Kernel(BestCall, "sampling"),
    "mask_tokens": Kernel(MaskCall, "sampling"),
    "block_rows": Kernel(BlockRowsCall, "embedding"),
    "combine": Kernel(CombineCall, "activation"),
    "embedding": Kernel(EmbeddingCall, "embedding"),
    "experts": Kernel(ExpertsCall, "linear"),
    "gather": Kernel(GatherCall, "exchange"),
    "gather_rows": Kernel(GatherRowsCall, "exchange"),
    "gather_tokens": Kernel(GatherTokensCall, "exchange", turns_to="gathered"),
    "heads": Kernel(HeadsCall, "linear"),
    "latent_rope": Kernel(LatentRopeCall, "rope"),
    "clamped_swiglu_mul": Kernel(GatedCall, "activation"),
    "gelu_tanh_mul": Kernel(GatedCall, "activation"),
    "linear": Kernel(LinearCall, "linear"),
    "linear_int8": Kernel(Int8LinearCall, "linear"),
    "own_ids": Kernel(OwnIdsCall, "exchange"),
    "own_tokens": Kernel(OwnTokensCall, "exchange", turns_to="tokens"),
    "place_experts": Kernel(PlaceExpertsCall, "activation"),
    "place_tokens": Kernel(PlaceCall, "embedding", "sequences"),
    "rms_norm": Kernel(NormCall, "norm"),
    "rope_and_store": Kernel(RopeCall, "rope"),
    "rounded_block_rows": Kernel(BlockRowsCall, "embedding"),
    "route": Kernel(RouteCall, "activation"),
    "silu_mul": Kernel(GatedCall, "activation"),
    "soft_cap": Kernel(SoftCapCall, "activation"),
    "top_tokens": Kernel(TopCall, "sampling"),
}
"""Name -> kernel, for every C function that computes a part of a forward pass."""

RANK_FUNCTIONS = {
    "ranks_create": ((_pointer, _i64, _i32, _i32), _pointer),
    "ranks_announce": ((_pointer, _i64), None),
    "ranks_is_awaited": ((_pointer,), _i32),
    "ranks_meet": ((_pointer, _pointer), _i32),
    "ranks_leave": ((_pointer,), None),
    "ranks_free": ((_pointer,), None),
}
"""Name -> the types of arguments and result, for the functions of ranks.cpp that are no kernels."""


class Kernels:
    """The entry points at one level: a function per entry of KERNELS, called with the address of
    its struct. While a step is captured (``recorded_by``), a call is recorded and does not run."""

    attention_plan: Callable[[int], None]
    attention: Callable[[int], None]
    best_tokens: Callable[[int], None]
    mask_tokens: Callable[[int], None]
    block_rows: Callable[[int], None]
    combine: Callable[[int], None]
    embedding: Callable[[int], None]
    experts: Callable[[int], None]
    gather: Callable[[int], None]
    gather_rows: Callable[[int], None]
    gather_tokens: Callable[[int], None]
    heads: Callable[[int], None]
    latent_rope: Callable[[int], None]
    clamped_swiglu_mul: Callable[[int], None]
    gelu_tanh_mul: Callable[[int], None]
    linear: Callable[[int], None]
    linear_int8: Callable[[int], None]
    own_ids: Callable[[int], None]
    own_tokens: Callable[[int], None]
    place_experts: Callable[[int], None]
    place_tokens: Callable[[int], None]
    rms_norm: Callable[[int], None]
    rope_and_store: Callable[[int], None]
    rounded_block_rows: Callable[[int], None]
    route: Callable[[int], None]
    silu_mul: Callable[[int], None]
    soft_cap: Callable[[int], None]
    top_tokens: Callable[[int], None]
    program: Callable[[int], None]
    """Runs a captured step."""
    ranks_create: Callable[[int, int, int, int], int]
    ranks_announce: Callable[[int, int], None]
    ranks_is_awaited: Callable[[int], int]
    ranks_meet: Callable[[int, int], int]
    ranks_leave: Callable[[int], None]
    ranks_free: Callable[[int], None]

    def __init__(self, path: Path, level: str) -> None:
        """Raises KernelsUnavailable if the library's structs differ from those of ``calls``."""
        library = ctypes.CDLL(str(path))
        library.setpoint_layouts.restype = ctypes.c_char_p
        if found := difference(library.setpoint_layouts().decode()):
            raise KernelsUnavailable(f"the C++ kernels and their Python callers differ: {found}")
        self._record: Callable[[str, int], None] | None = None
        """Receives the calls while a step is captured; written by ``recorded_by``."""
        self._addresses: dict[str, int] = {}
        for name in KERNELS:
            function = getattr(library, f"setpoint_{name}")
            function.argtypes, function.restype = (_pointer,), None
            self._addresses[name] = ctypes.cast(function, _pointer).value
            setattr(self, name, self._launcher(name, function))
        self.program = library.setpoint_program
        self.program.argtypes, self.program.restype = (_pointer,), None
        self.level = level
        self.path = path
        self.usable: bool = bool(library.setpoint_has_tiles())
        """Whether the processor really has what its flags promise for this level (matrix tiles)."""
        library.setpoint_implementations.restype = ctypes.c_char_p
        self.implementations = implementations(library.setpoint_implementations().decode())
        """Product -> its implementations at this level, which give the same bits. Without a choice
        the first one runs."""
        self.choices: tuple[TunedProduct, ...] = ()
        """The choices among them; written once, by ``load``."""
        self._choose = library.setpoint_choose
        library.setpoint_vector_columns.restype = _i64
        self.vector_columns: int = library.setpoint_vector_columns()
        """Number of fp32 elements in a vector at this level."""
        library.setpoint_k_multiple.restype = _i64
        self.k_multiple: int = library.setpoint_k_multiple()
        """The panels of a bf16 or int8 weight are padded with zeros to a multiple of this many
        4-byte words of K: the words of a tile if there are tiles, else 1."""
        self.plan_create = library.setpoint_plan_create
        self.plan_create.restype = _pointer
        self.plan_free = library.setpoint_plan_free
        self.plan_free.argtypes, self.plan_free.restype = (_pointer,), None
        for name, (arguments, result) in RANK_FUNCTIONS.items():
            function = getattr(library, f"setpoint_{name}")
            function.argtypes, function.restype = arguments, result
            setattr(self, name, function)
        self.pack_blocks = library.setpoint_pack_blocks
        self.pack_rounded_blocks = library.setpoint_pack_rounded_blocks
        for pack in (self.pack_blocks, self.pack_rounded_blocks):
            pack.argtypes = (_pointer, _i64, _i64, _pointer, _i32, _i32, _i32)
            pack.restype = None
        self.int8_round = library.setpoint_int8_round
        self.int8_round.argtypes = (_pointer, _i64, _i64, _pointer, _i64, _pointer, _i32, _i32)
        self.int8_round.restype = None
        self.read_memory = library.setpoint_read_memory
        self.read_memory.argtypes, self.read_memory.restype = (_pointer, _i64, _i32), None
        self.multiply = library.setpoint_multiply
        self.multiply.argtypes, self.multiply.restype = (_i32, _i64, _i32), _i64

    @property
    def is_recorded(self) -> bool:
        """Whether calls are recorded at the moment."""
        return self._record is not None

    def choose(self, product: str, size_class: int, implementation: int) -> None:
        """Use this implementation of a product for the rows of a class (``choices.CLASS_ROWS``)."""
        self._choose(list(self.implementations).index(product), size_class, implementation)

    def address(self, name: str) -> int:
        """Address of the C function of an entry of KERNELS."""
        return self._addresses[name]

    @contextlib.contextmanager
    def recorded_by(self, record: Callable[[str, int], None]) -> Iterator[None]:
        """Within the block, a call of a kernel calls ``record(name, address of its struct)``
        instead."""
        self._record = record
        try:
            yield
        finally:
            self._record = None

    def _launcher(self, name: str, function: Callable[[int], None]) -> Callable[[int], None]:
        def launch(address: int) -> None:
            if self._record is None:
                function(address)
            else:
                self._record(name, address)

        return launch


def load(level: str | None = None) -> Kernels:
    """The kernels at the given level, by default at $SETPOINT_CPU_ISA, or else at the best level of
    this machine. Raises KernelsUnavailable if they cannot be loaded."""
    return _load(level or os.environ.get(build.LEVEL_VARIABLE, ""))


@functools.cache
def _load(name: str) -> Kernels:
    try:
        while True:
            level = build.choose_level(name)
            try:
                kernels = _open(level)
            except build.CompileError as error:
                build.refuse(level, f"the C++ kernels for {level} cannot be compiled: {error}")
                if name:
                    raise
                continue
            if kernels.usable:
                if not build.is_emulated(level):
                    kernels.choices = choose(kernels, kernels.path, probe.measure)
                return kernels
            build.refuse(
                level,
                "this CPU reports matrix tiles but has no palette of them, as under some"
                " hypervisors",
            )
    except (build.BuildError, OSError) as error:
        raise KernelsUnavailable(str(error)) from error


def _open(level: str) -> Kernels:
    share_openmp()
    try:
        return Kernels(build.ensure_built(level), level)
    except OSError as error:
        logger.warning(
            "The kernel cache cannot be used (%s); compiling the C++ kernels for this process"
            " only.",
            error,
        )
        scratch = Path(tempfile.mkdtemp(prefix="setpoint-kernels-"))
        try:
            build.compile_to(scratch / "kernels.so", level)
            return Kernels(scratch / "kernels.so", level)
        finally:
            shutil.rmtree(scratch)  # a loaded library no longer needs its file
