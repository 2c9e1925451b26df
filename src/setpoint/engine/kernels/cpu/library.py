"""Loads the compiled kernels and binds their C entry points: levels, threads, argument structs.

Works on raw addresses; ``ops`` and ``engine.attention.cpu`` check tensors before they call. Knows nothing of what is computed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch

from setpoint.engine.kernels.cpu import build
from setpoint.engine.kernels.ops import KernelsUnavailable

logger = logging.getLogger(__name__)

LEVEL_VARIABLE = "SETPOINT_CPU_ISA"
"""Environment variable that forces a level: scalar, avx2, avx512, avx512_vnni or avx512_bf16."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The C side's numbers (simd.h, DType)."""

_pointer, _i64, _i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class AttentionCall(ctypes.Structure):
    """plan.h, struct AttentionCall."""

    _fields_ = [
        *((name, _pointer) for name in ("q", "out", "k_cache", "v_cache", "cu_q", "kv_lens", "slots", "page_table")),
        *((name, _i64) for name in ("q_stride", "table_stride", "num_heads", "num_kv_heads", "head_dim", "page_size", "window")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *((name, _i32) for name in ("q_dtype", "kv_dtype", "threads")),
    ]


class RopeCall(ctypes.Structure):
    """elementwise.cpp, struct RopeCall."""

    _fields_ = [
        *((name, _pointer) for name in ("q", "k", "v", "cos_sin", "positions", "k_cache", "v_cache", "kv_index")),
        *((name, _i64) for name in ("tokens", "num_heads", "num_kv_heads", "head_dim", "rotary_dim")),
        *((name, _i64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, _i32) for name in ("dtype", "kv_dtype", "threads")),
    ]


class LinearCall(ctypes.Structure):
    """panels.h, struct LinearCall."""

    _fields_ = [
        *((name, _pointer) for name in ("x", "weight", "bias", "out")),
        *((name, _i64) for name in ("rows", "columns", "k_words")),
        *((name, _i32) for name in ("dtype", "threads")),
    ]


class Int8LinearCall(ctypes.Structure):
    """linear_int8.cpp, struct Int8LinearCall."""

    _fields_ = [
        *((name, _pointer) for name in ("x", "weight", "scales", "shifts", "bias", "out")),
        *((name, _i64) for name in ("rows", "columns", "k", "k_words")),
        *((name, _i32) for name in ("dtype", "threads")),
    ]


_SIGNATURES = {
    "setpoint_plan_free": (_pointer,),
    "setpoint_plan_build": (_pointer, _pointer, _i32),
    "setpoint_attention": (_pointer, _pointer),
    "setpoint_rms_norm": (_pointer, _pointer, _pointer, _pointer, _i64, _i64, ctypes.c_float, ctypes.c_float, _i32, _i32),
    "setpoint_rope_and_store": (_pointer,),
    "setpoint_linear": (_pointer,),
    "setpoint_linear_int8": (_pointer,),
    "setpoint_silu_mul": (_pointer, _pointer, _i64, _i64, _i32, _i32),
    "setpoint_gelu_tanh_mul": (_pointer, _pointer, _i64, _i64, _i32, _i32),
    "setpoint_read_memory": (_pointer, _i64, _i32),
    "setpoint_multiply": (_i32, _i64, _i32),
}


class Kernels:
    """The entry points at one level."""

    def __init__(self, path: Path, level: str) -> None:
        library = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            getattr(library, name).argtypes = arguments
            getattr(library, name).restype = None
        library.setpoint_plan_create.restype = _pointer
        self.level = level
        self.plan_create = library.setpoint_plan_create
        self.plan_free = library.setpoint_plan_free
        self.plan_build = library.setpoint_plan_build
        self.attention = library.setpoint_attention
        self.rms_norm = library.setpoint_rms_norm
        self.rope_and_store = library.setpoint_rope_and_store
        self.linear = library.setpoint_linear
        self.linear_int8 = library.setpoint_linear_int8
        self.silu_mul = library.setpoint_silu_mul
        self.gelu_tanh_mul = library.setpoint_gelu_tanh_mul
        self.read_memory = library.setpoint_read_memory
        self.multiply = library.setpoint_multiply
        self.multiply.restype = _i64


def load(level: str | None = None) -> Kernels:
    """The kernels at the given level, else at $SETPOINT_CPU_ISA, else at the best this machine has. KernelsUnavailable if not."""
    return _load(level or os.environ.get(LEVEL_VARIABLE, ""))


@functools.cache
def _load(name: str) -> Kernels:
    try:
        level = build.choose_level(name)
        _share_openmp()
        try:
            return Kernels(build.ensure_built(level), level)
        except OSError as error:
            logger.warning("The kernel cache cannot be used (%s); compiling the C++ kernels for this process only.", error)
            scratch = Path(tempfile.mkdtemp(prefix="setpoint-kernels-"))
            try:
                build.compile_library(build.find_compiler(), level, scratch / "kernels.so")
                return Kernels(scratch / "kernels.so", level)
            finally:
                shutil.rmtree(scratch)  # a loaded library needs its file no more
    except (build.BuildError, OSError) as error:
        raise KernelsUnavailable(str(error)) from error


def _share_openmp() -> None:
    """Make the symbols of the OpenMP runtime that torch has loaded visible to ours, which is linked without one."""
    with open("/proc/self/maps") as maps:
        mapped = {line.split()[-1] for line in maps}
    runtimes = sorted(path for path in mapped if os.path.basename(path).startswith(("libgomp", "libiomp5", "libomp")))
    if not runtimes:
        raise KernelsUnavailable("torch has loaded no OpenMP runtime to share")
    ctypes.CDLL(runtimes[0], mode=ctypes.RTLD_GLOBAL)
