"""Triton kernels interpreted on the CPU, with the results of a GPU.

Import this module before any module that defines kernels: whether a kernel is interpreted or
compiled is decided where it is defined, so a process does one or the other. Triton's interpreter
(seen in 3.6.0 to 3.9.0) differs from a GPU without a word:

* it keeps bf16 as the bits of an integer, and dots, arithmetic and comparisons work on these
  bits (triton-lang/triton issue 11584, closed as unsupported);
* conversions to bf16 and fp8 cut bits off instead of rounding to nearest even;
* numpy warns of overflows and NaN, which a GPU computes with in silence.

Here products and conversions are right, nothing warns, and arithmetic on narrow types raises: a
kernel computes in fp32 anyway. Calls of functions by kernels take a tenth of their time: at each one
the interpreter replaces the functions of the language once more, by calls of the former ones.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    GridExecutor,
    InterpretedFunction,
    InterpreterBuilder,
    TensorHandle,
)

from setpoint_testing.fake_graphs import recording

DTYPES = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
BITS = {1: torch.uint8, 2: torch.uint16}
"""Bytes of a narrow type -> the integers as which the interpreter keeps it."""
NARROW = (tl.bfloat16, tl.float8e4nv, tl.float8e5)


def _values(handle: TensorHandle) -> torch.Tensor:
    return torch.from_numpy(np.array(handle.data)).view(DTYPES[handle.dtype.scalar])


def _convert(self: Any, source: TensorHandle, target: Any, rounding_mode: Any = None) -> Any:
    before, after = source.dtype.scalar, target.scalar
    if before not in DTYPES or after not in DTYPES:
        return self.cast_impl(source, target)
    values = _values(source).to(torch.float64 if before == tl.float64 else torch.float32)
    if after in (tl.float8e4nv, tl.float8e5):  # PTX: cvt.rn.satfinite
        largest = torch.finfo(DTYPES[after]).max
        values = values.clamp(-largest, largest)
    values = values.to(DTYPES[after])
    bits = values.view(BITS[values.itemsize]) if after in NARROW else values
    return TensorHandle(bits.numpy(), after)


def _dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any) -> TensorHandle:
    left, right = (
        _values(each).float().numpy()
        if each.dtype.scalar.is_floating() and each.dtype.scalar.primitive_bitwidth < 32
        else each.data
        for each in (a, b)
    )
    return TensorHandle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _refusing(operation: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, *handles: Any) -> Any:
        for each in handles:
            if isinstance(each, TensorHandle) and each.dtype.scalar in NARROW:
                raise TypeError(f"arithmetic on {each.dtype.scalar}: convert it to fp32 first")
        return operation(self, *handles)

    return checked


_replaced: list[Any] = []


def _call(self: Any, *arguments: Any, **named: Any) -> Any:
    """A function called by a kernel. Its launch has replaced what the kernel's module sees of the
    language, but not what Triton's own functions see of it; that stays replaced."""
    language = self.fn.__globals__.get("core")
    if language is tl.core and language not in _replaced:
        interpreter._patch_lang(self.fn)
        _replaced.append(language)
    return self.rewrite()(*arguments, **named)


GridExecutor.__call__ = recording(np.errstate(all="ignore")(GridExecutor.__call__))
InterpretedFunction.__call__ = _call
InterpreterBuilder.create_dot = _dot
InterpreterBuilder.create_fp_to_fp = InterpreterBuilder.create_fp_trunc = _convert
InterpreterBuilder.create_fp_ext = _convert
InterpreterBuilder.binary_op = _refusing(InterpreterBuilder.binary_op)
