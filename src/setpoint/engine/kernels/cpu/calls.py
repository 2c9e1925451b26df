"""The arguments of kernels: the structs of calls.h, field by field.

The library reports their layouts (layouts.cpp), and ``difference`` compares them with these: a
struct that is changed on one side only would otherwise be misread without an error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import zip_longest

_pointer, _i64, _i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class AttentionCall(ctypes.Structure):
    _fields_ = [
        *(
            (name, _pointer)
            for name in (
                "plan",
                "q",
                "out",
                "k_cache",
                "v_cache",
                "cu_q",
                "kv_lens",
                "slots",
                "page_table",
                "sinks",
            )
        ),
        *(
            (name, _i64)
            for name in (
                "rows",
                "q_stride",
                "table_stride",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "page_size",
                "value_dim",
                "value_stride",
                "window",
            )
        ),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "v_scale")),
        *((name, _i32) for name in ("q_dtype", "kv_dtype", "threads")),
    ]


class EmbeddingCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("ids", "weight", "out")),
        *((name, _i64) for name in ("rows", "cols")),
        ("scale", ctypes.c_float),
        *((name, _i32) for name in ("dtype", "threads")),
    ]


class NormCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("x", "residual", "weight", "out")),
        *((name, _i64) for name in ("rows", "cols", "group", "stride")),
        ("eps", ctypes.c_float),
        ("offset", ctypes.c_float),
        *((name, _i32) for name in ("dtype", "threads")),
    ]


class GatedCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("gate_up", "out")),
        *((name, _i64) for name in ("rows", "cols")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
        *((name, _i32) for name in ("dtype", "threads")),
    ]


class SoftCapCall(ctypes.Structure):
    _fields_ = [
        ("x", _pointer),
        *((name, _i64) for name in ("rows", "cols")),
        ("cap", ctypes.c_float),
        *((name, _i32) for name in ("dtype", "threads")),
    ]


class RopeCall(ctypes.Structure):
    _fields_ = [
        *(
            (name, _pointer)
            for name in ("q", "k", "v", "cos_sin", "positions", "k_cache", "v_cache", "kv_index")
        ),
        *((name, _i64) for name in ("rows", "num_heads", "num_kv_heads", "head_dim", "rotary_dim")),
        *((name, _i64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_float) for name in ("k_scale", "v_scale")),
        *((name, _i32) for name in ("dtype", "kv_dtype", "threads")),
    ]


class LatentRopeCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("q_latent", "q_rope", "latent", "k_rope", "q", "cos_sin")),
        *((name, _pointer) for name in ("positions", "cache", "kv_index")),
        *((name, _i64) for name in ("rows", "heads", "rank", "rope", "q_row", "q_head", "k_row")),
        ("scale", ctypes.c_float),
        *((name, _i32) for name in ("interleaved", "dtype", "kv_dtype", "threads")),
    ]


class LinearCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("x", "weight", "bias", "out")),
        *((name, _i64) for name in ("rows", "columns", "k_words", "out_row")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
        *((name, _i32) for name in ("dtype", "gate", "blocks", "rounded", "threads")),
    ]


class BlockRowsCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("ids", "weight", "out")),
        *((name, _i64) for name in ("rows", "blocks")),
        ("scale", ctypes.c_float),
        *((name, _i32) for name in ("kind", "threads")),
    ]


class Int8LinearCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("x", "weight", "scales", "shifts", "bias", "out")),
        *((name, _i64) for name in ("rows", "columns", "k", "k_words")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "x_scale")),
        *((name, _i32) for name in ("rotated", "dtype", "gate", "threads")),
    ]


class RouteCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("logits", "ids", "weights", "correction")),
        *((name, _i64) for name in ("rows", "experts", "chosen", "groups", "open", "best")),
        ("scaling", ctypes.c_float),
        *((name, _i32) for name in ("scoring", "normalise", "dtype", "threads")),
    ]


class PlaceExpertsCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("ids", "positions", "places", "slots", "load")),
        *((name, _i64) for name in ("rows", "chosen", "width")),
    ]


class ExpertsCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("weights", "ids", "x", "out")),
        *(
            (name, _i64)
            for name in ("rows", "pairs_per_row", "first", "experts", "x_bytes", "out_bytes")
        ),
        *((name, _i32) for name in ("is_int8", "threads")),
    ]


class HeadsCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("weights", "x", "out")),
        *((name, _i64) for name in ("rows", "heads", "x_bytes", "x_row", "x_head", "out_bytes")),
        ("threads", _i32),
    ]


class CombineCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("parts", "weights", "shared", "gate", "out")),
        *((name, _i64) for name in ("rows", "chosen", "cols")),
        *((name, _i32) for name in ("dtype", "threads")),
    ]


class PlaceCall(ctypes.Structure):
    _fields_ = [
        *(
            (name, _pointer)
            for name in (
                "slots",
                "cu_q",
                "kv_lens",
                "known",
                "page_table",
                "ids",
                "positions",
                "kv_index",
            )
        ),
        *((name, _i64) for name in ("rows", "known_stride", "table_stride", "page_size")),
    ]


class BestCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("logits", "out")),
        *((name, _i64) for name in ("rows", "cols")),
        *((name, _i32) for name in ("dtype", "threads")),
    ]


class TopCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("logits", "out")),
        *((name, _i64) for name in ("rows", "cols", "count")),
        *((name, _i32) for name in ("dtype", "threads")),
    ]


class MaskCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("logits", "which", "words")),
        *((name, _i64) for name in ("rows", "cols", "words_per_row")),
        *((name, _i32) for name in ("dtype", "threads")),
    ]


class GatherCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("ranks", "x", "out", "begins")),
        ("rows", _i64),
        *((name, _i32) for name in ("element_bytes", "first_only", "threads")),
    ]


class GatherRowsCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("ranks", "ids", "x", "out")),
        *((name, _i64) for name in ("rows", "row_bytes", "first", "count")),
        ("threads", _i32),
    ]


class GatherTokensCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("ranks", "x", "out")),
        *((name, _i64) for name in ("rows", "row_bytes")),
        ("threads", _i32),
    ]


class OwnTokensCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("ranks", "x", "out")),
        *((name, _i64) for name in ("rows", "row_bytes")),
        ("threads", _i32),
    ]


class OwnIdsCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("ids", "out")),
        *((name, _i64) for name in ("rows", "first", "count")),
    ]


class ProgramOp(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("kernel", "call", "rows")),
        *((name, _i64) for name in ("per_count", "counts", "kind")),
    ]


class ProgramCall(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("ops", "counts", "nanoseconds")),
        ("num_ops", _i64),
        ("threads", _i32),
    ]


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    PlaceCall,
    EmbeddingCall,
    BlockRowsCall,
    NormCall,
    LinearCall,
    Int8LinearCall,
    RouteCall,
    PlaceExpertsCall,
    ExpertsCall,
    HeadsCall,
    CombineCall,
    GatedCall,
    SoftCapCall,
    RopeCall,
    LatentRopeCall,
    AttentionCall,
    BestCall,
    TopCall,
    MaskCall,
    GatherCall,
    GatherRowsCall,
    GatherTokensCall,
    OwnTokensCall,
    OwnIdsCall,
    ProgramOp,
    ProgramCall,
)
"""All structs, in the order of calls.h."""

_KINDS = {_pointer: "p", _i64: "i", _i32: "i", ctypes.c_float: "f"}


def difference(theirs: str) -> str:
    """The first difference between these structs and the library's layouts; "" if there is none."""
    for ours, line in zip_longest(_layouts(), theirs.splitlines(), fillvalue="nothing"):
        if ours != line:
            return f"Python has {ours}, C++ has {line} (name, kind, offset, size)"
    return ""


def _layouts() -> Iterator[str]:
    """This module's layouts, in the format of ``setpoint_layouts``."""
    for struct in STRUCTS:
        yield f"{struct.__name__} {ctypes.sizeof(struct)}"
        for name, kind in struct._fields_:
            field = getattr(struct, name)
            yield f"{struct.__name__}.{name} {_KINDS[kind]} {field.offset} {field.size}"
