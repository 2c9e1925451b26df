"""Plain values, as JSON has them, converted to declared types in any thread."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")

_lock = threading.Lock()
_collected: set[Any] = set()
"""The types whose fields msgspec has collected; written by ``convert``."""


def convert(value: Any, kind: type[T]) -> T:
    """``msgspec.convert``, for types that several threads use, and for whole numbers that are
    written as floats (5.0): many languages have one kind of number. Raises
    msgspec.ValidationError.

    msgspec collects the fields of a class when it first converts to it, and other threads see the
    collection before it is complete: they follow a null pointer, and the process ends with SIGSEGV
    (msgspec 0.22, StructInfo_Convert in _core.c). So one thread at a time makes msgspec collect a
    type with everything it contains, and no thread converts to it before.
    """
    if kind not in _collected:
        with _lock:
            msgspec.json.Decoder(kind)
        _collected.add(kind)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
    declared: Any = kind
    return msgspec.convert(_with_whole_numbers(value, alternatives(_info(declared))), kind)


def as_whole(value: Any) -> Any:
    """A float that is a whole number as an integer; any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def alternatives(node: inspect.Type) -> list[inspect.Type]:
    """The types of a union, or the type itself, without their bounds."""
    if isinstance(node, inspect.UnionType):
        return [each for option in node.types for each in alternatives(option)]
    return alternatives(node.type) if isinstance(node, inspect.Metadata) else [node]


def inner_types(nodes: list[inspect.Type], step: str | None) -> list[inspect.Type]:
    """The types that a value inside one of ``nodes`` may have. step: its key; None: in a list."""
    found = []
    for node in nodes:
        if isinstance(node, inspect.StructType):
            found += [each.type for each in node.fields if each.encode_name == step]
        elif isinstance(node, inspect.DictType) and step is not None:
            found.append(node.value_type)
        elif isinstance(node, inspect.TupleType) and step is None:
            found += node.item_types
        elif isinstance(node, _LISTS) and step is None:
            found.append(node.item_type)
    return [each for node in found for each in alternatives(node)]


_LISTS = inspect.ListType | inspect.VarTupleType | inspect.SetType | inspect.FrozenSetType


@cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _with_whole_numbers(value: Any, nodes: list[inspect.Type]) -> Any:
    """The value with integers for the whole floats in it where its types (``alternatives``) have
    integers and no floats."""
    if isinstance(value, float):
        takes = {type(node) for node in nodes}
        is_int = inspect.IntType in takes and not takes & {inspect.FloatType, inspect.AnyType}
        return as_whole(value) if is_int else value
    if isinstance(value, list | tuple) and (inner := inner_types(nodes, None)):
        return [_with_whole_numbers(each, inner) for each in value]
    if isinstance(value, dict):
        return {
            key: _with_whole_numbers(each, inner_types(nodes, key))
            if isinstance(key, str)
            else each
            for key, each in value.items()
        }
    return value
