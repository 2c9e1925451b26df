"""Opens a log, packed or not, and cuts it into blocks of whole lines.

Blocks depend only on the bytes of the log, not on how they arrive, so that a pipe gives the same
observations as a file.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from setpoint.core.errors import SourceError
from setpoint.core.plain_file import open_at_once

STDIN = "-"
BLOCK = 1 << 20
"""Bytes of a block, to which its last line is added."""
MAX_LINE = 1 << 16
"""Most bytes of a line that are read; request logs may have prompts of any length."""

MAX_SWOLLEN = 64 << 20
MAX_RATIO = 250
"""A packed log is read to its end unless it becomes longer than MAX_SWOLLEN bytes and than
MAX_RATIO times its packed length. Logs shrink to a tenth or a fiftieth; a file that was made to
keep its reader busy shrinks to a thousandth (gzip's most) or less."""

_GZIP_FORMAT = 31
_PACKED = 1 << 14  # bytes that are unpacked at a time: they may become a thousand times as many
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_WIDE = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_COLOURS = re.compile(rb"\x1b\[[0-9;:?]*[A-Za-z]|\x1b\][^\x07\n]*\x07")
_CONTROL = bytes(sorted({*range(32), 127} - set(b"\t\n\v\f\r\b\x1b")))


def is_packed(path: Path) -> bool:
    """Whether a file begins like one of gzip or Zstandard."""
    with path.open("rb") as file:
        return file.read(4).startswith((_GZIP, _ZSTD))


class SwollenError(Exception):
    """A packed log unpacks to too much to be read any further."""


@contextmanager
def open_log(name: str) -> Iterator[Iterator[bytes]]:
    """Yields the bytes of a log in chunks, unpacked, as UTF-8 (or another encoding with ASCII).

    name: a path, or "-" for standard input. Raises SourceError if there is nothing to read, or if
    it is not text; later damage ends the log where the damage begins. The chunks end with a
    SwollenError if a packed log unpacks to too much.
    """
    if name == STDIN:
        if sys.stdin is None:
            raise SourceError("Standard input is closed. The log of a server was expected.")
        yield _text(name, iter(lambda: sys.stdin.buffer.read(BLOCK), b""))
        return
    try:
        with open(name, "rb", opener=open_at_once) as file:
            if not _has_end(file):
                raise SourceError(
                    f"{name} is no plain file. Give a log file, or - for standard input."
                )
            os.set_blocking(file.fileno(), True)
            yield _text(name, _unpacked(name, file))
    except OSError as error:
        why = error.strerror or error
        raise SourceError(f"Cannot read {name}: {why}. A log file was expected.") from error


def _has_end(file: BinaryIO) -> bool:
    """Whether it is a plain file, or the pipe of the shell's <(command), which has a writer. A pipe
    in a folder may never get one, and a device may have no end."""
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISFIFO(mode):
        return os.readlink(f"/proc/self/fd/{file.fileno()}").startswith("pipe:")
    return stat.S_ISREG(mode)


def _unpacked(name: str, file: BinaryIO) -> Iterator[bytes]:
    if not file.seekable():  # a pipe with a name, such as the shell's <(command)
        yield from iter(lambda: file.read(BLOCK), b"")
        return
    magic = file.read(4)
    file.seek(0)
    if magic.startswith(_GZIP):
        chunks = _inflated(file)
    elif magic == _ZSTD:
        chunks = _decompressed(name, file)
    else:
        chunks = iter(lambda: file.read(BLOCK), b"")
    size = 0
    try:
        for chunk in chunks:
            size += len(chunk)
            yield chunk
            if size > MAX_SWOLLEN and size > MAX_RATIO * file.tell():
                raise SwollenError(
                    f"{name} unpacks to more than {MAX_RATIO} times its size, as no log does; what"
                    f" is after the first {size >> 20} MiB was left out."
                )
    except zlib.error as error:
        if not size:
            raise SourceError(f"Cannot unpack {name}: {error}. It is damaged.") from error
        # A copy that broke off: what is there counts.


def _inflated(file: BinaryIO) -> Iterator[bytes]:
    """The parts of a gzip file up to its end or to where it was cut off."""
    inflate = zlib.decompressobj(_GZIP_FORMAT)
    while packed := file.read(_PACKED):
        while packed:
            yield inflate.decompress(packed)
            packed = inflate.unused_data
            if inflate.eof:
                inflate = zlib.decompressobj(_GZIP_FORMAT)


def _decompressed(name: str, file: BinaryIO) -> Iterator[bytes]:
    """The parts of a Zstandard file, like ``_inflated``, with zlib's error for damage. Raises
    SourceError without the package for that, which is larger than all of Setpoint."""
    try:
        import zstandard
    except ModuleNotFoundError:
        raise SourceError(
            f"Cannot unpack {name}: that needs the package zstandard. Install it with 'pip install"
            f" zstandard', or unpack the log with 'zstd -d {name}'."
        ) from None
    reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    try:
        yield from iter(lambda: reader.read(BLOCK), b"")
    except zstandard.ZstdError as error:
        raise zlib.error(str(error)) from error


def _text(name: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    first = b""
    for chunk in chunks:
        first += chunk  # chunks may be empty
        if len(first) >= MAX_LINE:
            break
    shown = "Standard input" if name == STDIN else name
    if not first:
        raise SourceError(f"{shown} is empty. The log of a server was expected.")
    wide = _WIDE.get(first[:2])
    if wide is not None and not first.startswith(codecs.BOM_UTF32_LE):
        return _narrowed(wide, first, chunks)
    # A log that was truncated while it was open begins with zeros; one may end with zeros after a
    # power failure.
    head = first.strip(b"\0")[:MAX_LINE]
    if len(head) - len(head.translate(None, _CONTROL)) > len(head) / 100:
        raise SourceError(f"{shown} is a binary file. The log of a server was expected.")
    document = _document(head.removeprefix(codecs.BOM_UTF8))
    if document:  # a saved report quotes lines of a log
        raise SourceError(f"{shown} is {document}. The log of a server was expected.")
    return _from(first.removeprefix(codecs.BOM_UTF8), chunks)


def _document(head: bytes) -> str:
    """The kind of document that begins like this; "" if it may be a log."""
    if head.lstrip()[:15].lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page"
    return "a JSON document" if re.match(rb"[{\[]\s*\n", head) else ""


def _narrowed(encoding: str, first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yields UTF-16 text (as PowerShell's ``>`` writes it) as UTF-8."""
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    for chunk in _from(first[2:], chunks):
        yield decoder.decode(chunk).encode("utf-8", "replace")


def _from(first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from chunks


def blocks(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yields blocks of whole lines without the last newline, in order, and whether the last line of
    the block is complete: only the last line of a log may not be.

    Colours are gone, and a line ends with "\\n" alone. Of an endless line, at least ``MAX_LINE``
    bytes are kept. A SwollenError of ``chunks`` comes after what was there before it.
    """
    parts: list[bytes] = []
    size = 0
    swollen: list[SwollenError] = []
    for chunk in _until_swollen(chunks, swollen):
        start = 0
        while size + len(chunk) - start >= BLOCK:
            # The cut is at the first line end at or after BLOCK bytes.
            end = chunk.find(b"\n", max(start, start + BLOCK - size - 1))
            if end < 0:
                break
            parts.append(chunk[start:end])
            yield _without_colours(b"".join(parts)), True
            parts, size, start = [], 0, end + 1
        rest = chunk[start:]
        if size >= BLOCK + MAX_LINE:  # in an endless line: one byte tells that it is long
            continue
        parts.append(rest)
        size += len(rest)
    last = b"".join(parts)
    if last:
        yield _without_colours(last.removesuffix(b"\n")), last.endswith(b"\n")
    if swollen:
        raise swollen[0]


def _until_swollen(chunks: Iterable[bytes], errors: list[SwollenError]) -> Iterator[bytes]:
    """The chunks before a SwollenError, which is put into ``errors``."""
    try:
        yield from chunks
    except SwollenError as error:
        errors.append(error)


def _without_colours(block: bytes) -> bytes:
    if b"\x1b" in block:
        block = _COLOURS.sub(b"", block)
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n").removesuffix(b"\r")
    return block
