"""Plain values, as JSON has them, converted to declared types in any thread."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_learning = threading.Lock()
_learned: set[Any] = set()
"""The types that msgspec knows in full; written by ``convert``."""


def convert(value: Any, kind: type[T]) -> T:
    """``msgspec.convert``, for types that several threads use. Raises msgspec.ValidationError.

    msgspec learns the fields of a class when it first converts to it, and other threads see what it
    has learned before that is complete: they follow a null pointer, and the process ends with
    SIGSEGV (msgspec 0.22, StructInfo_Convert in _core.c). So one thread at a time learns a type,
    with all that it contains, and nobody converts to it before.
    """
    if kind not in _learned:
        with _learning:
            msgspec.json.Decoder(kind)
        _learned.add(kind)
    return msgspec.convert(value, kind)
