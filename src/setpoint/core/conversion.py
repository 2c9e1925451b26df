"""Plain values, as JSON has them, converted to declared types in any thread."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_lock = threading.Lock()
_collected: set[Any] = set()
"""The types whose fields msgspec has collected; written by ``convert``."""


def convert(value: Any, kind: type[T]) -> T:
    """``msgspec.convert``, for types that several threads use. Raises msgspec.ValidationError.

    msgspec collects the fields of a class when it first converts to it, and other threads see the
    collection before it is complete: they follow a null pointer, and the process ends with SIGSEGV
    (msgspec 0.22, StructInfo_Convert in _core.c). So one thread at a time makes msgspec collect a
    type with everything it contains, and no thread converts to it before.
    """
    if kind not in _collected:
        with _lock:
            msgspec.json.Decoder(kind)
        _collected.add(kind)
    return msgspec.convert(value, kind)
