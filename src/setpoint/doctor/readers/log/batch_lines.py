"""Reads one line that reports a batch, and makes the pattern of all lines of the same shape.

The generations, from threads of sgl-project/sglang: 2024 ``Prefill batch. … cache hit
rate: 2.76% …`` (#1612); 2025 ``Decode batch. … cuda graph: True, …, `` (#10053), with speculation
``accept len: 2.54, …, largest-len: 0`` (#4759), disaggregated ``#unbootstrapped-req`` (#7353); from
late 2025 with commas (#13023, #22166); 2026 ``#full token``, ``swa token usage``, ``mamba usage``,
``npu graph``, ``#pending-token`` (#30047, #36081). Setpoint writes the last form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from setpoint.doctor.readers.log.prefix import (
    NO_STAMP,
    digits_pattern,
    prefix_pattern,
    stamp_pattern,
)
from setpoint.doctor.readers.log.wrapping import STAMP, unwrap

Kind = Literal["prefill", "decode"]

FIELDS = {
    "running-req": "running",
    "queue-req": "queue",
    "grammar-queue-req": "preparing",
    "token usage": "usage",
    "full token usage": "usage",
    "token": "tokens",
    "full token": "tokens",
    "pending-token": "pending_tokens",
    "new-seq": "new_seqs",
    "new-token": "new_tokens",
    "cached-token": "cached_tokens",
    "gen throughput (token/s)": "gen_throughput",
    "input throughput (token/s)": "input_throughput",
    "cuda graph": "graph",
    "cpu graph": "graph",
    "npu graph": "graph",
}
"""Name in the line, without "#" and with "-" for "_" -> field of a moment, or "graph"."""

_KNOWN = {
    "cache hit rate",
    "accept len",
    "accept rate",
    "largest-len",
    "swa token",
    "mamba num",
    "replay-token",
    "bootstrap-req",
    "unbootstrapped-req",
    "inflight-req",
    "transferring-req",
    "optimistic-req",
    "prealloc-req",
    "transfer-req",
    "host-receive-req",
    "retracted-req",
    "iter",
}
"""Names that have no field of their own and are kept in ``Moment.other``."""

MAX_BATCH_LINE = 1 << 13
MAX_FIELDS = 64
"""A server's lines do not have more fields; the longest have some 25."""
_START = re.compile(rb"([A-Za-z]+) batch[.,]? *(?:\[(\d+)\])?[.,]? *(?=#)")
_BETWEEN = re.compile(rb"[.,] +|[.,] *$")
_VALUE = re.compile(rb"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|inf|nan)|True|False")
# Sets of single characters, which the regular expression engine keeps as bitmaps; \d is none.
NUMBER = rb"([-+0-9.eEinfa]+)"
FLAG = rb"(True|False)"


def field_of(name: str) -> str:
    """The name under which a figure is stored: a field of a moment, "graph", "pool:NAME" (the usage
    of a second pool), or "other:NAME"."""
    found = FIELDS.get(name)
    if found is not None:
        return found
    pool = re.fullmatch(r"(.+?)(?: token)? usage", name)
    return f"pool:{pool[1]}" if pool else f"other:{name}"


def is_known(name: str) -> bool:
    return name in FIELDS or name in _KNOWN or name.endswith(" usage") or "TFLOPS" in name


@dataclass(slots=True, frozen=True)
class Shape:
    """What lines of one kind, of one server, and of one list of fields have in common."""

    pattern: bytes
    """A regular expression of the whole line. Its groups: stamp, fraction, rank, then the values
    of ``names``; or, if the stamp is last: rank, values, stamp, fraction."""
    kind: Kind
    names: tuple[str, ...]
    """Names of the fields, in the order of the line."""
    percent: frozenset[str]
    """Fields whose values are in percent."""
    origin: str
    style: str
    """What follows the word batch: "." or ","."""
    stamp_is_last: bool


def looks_like_batch(line: bytes) -> bool:
    """Whether the line reports a batch, or begins to and is cut off."""
    return b" batch" in line[:400] and _START.search(line, 0, 400) is not None


def shape_of(line: bytes) -> Shape | None:
    """The shape of a line that reports a batch; None if it reports none, or if one of its fields
    cannot be read."""
    if b"#" not in line or len(line) > MAX_BATCH_LINE:
        return None
    wrapped = unwrap(line)
    text = wrapped.text
    start = _START.search(text, 0, 400)
    if start is None or wrapped.start is None or b"etract" in text[: start.end()]:
        return None
    tail = line[wrapped.start + len(text) :]
    body, fields = text[start.end() :], []
    if body.count(b": ") > MAX_FIELDS:
        return None
    pattern = [re.escape(text[start.start() : start.end()])]
    if start[2]:
        number = text[start.start(2) : start.end(2)]
        pattern = [pattern[0].replace(re.escape(b"[" + number), rb"\[" + NUMBER)]
        fields.append("iter")
    found = _fields(body)
    if found is None:
        return None
    names, percent, rest = found
    prefix = prefix_pattern(line[: wrapped.start], text[: start.start()])
    ending = rb".*" if tail else rb"[ \t\r,.]*"
    stamp = STAMP.search(tail) if prefix.startswith(NO_STAMP) else None
    if stamp is not None:
        prefix = prefix.removeprefix(NO_STAMP)
        ending = (
            rb"[ \t\r,.]*" + digits_pattern(tail[: stamp.start()]) + stamp_pattern(stamp) + rb".*"
        )
    kind: Kind = "prefill" if "new-seq" in names else "decode"
    if "running-req" not in names and kind == "decode":
        return None
    marker = start.group()
    return Shape(
        pattern=prefix + pattern[0] + rest + ending,
        kind=kind,
        names=(*fields, *names),
        percent=frozenset(percent),
        origin=wrapped.origin,
        style="," if b"," in marker else "." if b"." in marker else "",
        stamp_is_last=stamp is not None,
    )


def _fields(body: bytes) -> tuple[list[str], set[str], bytes] | None:
    """Names, names with "%", and the pattern of ``#a: 1, b: 0.50, c (token/s): 3``."""
    names: list[str] = []
    percent: set[str] = set()
    pattern = b""
    position = 0
    pieces = _pieces(body)
    for index, (piece, end) in enumerate(pieces):
        name, colon, value = piece.rpartition(b": ")
        value = value.rstrip()
        is_percent = value.endswith(b"%")
        if not colon or not _VALUE.fullmatch(value.removesuffix(b"%")):
            return None
        key = name.lstrip(b"#").replace(b"_", b"-").decode(errors="replace")
        if key in names:
            return None
        names.append(key)
        if is_percent:
            percent.add(key)
        pattern += re.escape(name) + b": " + (FLAG if value in (b"True", b"False") else NUMBER)
        pattern += b"%" if is_percent else b""
        position += len(piece)
        if index + 1 < len(pieces):
            pattern += re.escape(body[end[0] : end[1]])
    return (names, percent, pattern) if names else None


def _pieces(body: bytes) -> list[tuple[bytes, tuple[int, int]]]:
    """The fields and where what follows each of them is. A dot may end a word of a name ("est.
    prefill …"): such pieces are put together."""
    pieces: list[tuple[bytes, tuple[int, int]]] = []
    start = 0
    for match in _BETWEEN.finditer(body):
        if b": " in body[start : match.start()]:
            pieces.append((body[start : match.start()], match.span()))
            start = match.end()
    if start < len(body):
        pieces.append((body[start:], (len(body), len(body))))
    return pieces
