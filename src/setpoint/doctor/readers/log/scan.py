"""Applies the patterns of all known shapes to a block at once: one pass in the regular expression
engine's C code finds every batch line of known shape; the other lines are looked at one by one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import compress

from setpoint.doctor.readers.log.batch_lines import Shape, looks_like_batch, shape_of
from setpoint.doctor.readers.log.stream import MAX_LINE

MAX_SHAPES = 48
MAX_GROUPS = 600
"""Most shapes, and most fields of all of them. A log has a few shapes with at most 25 fields;
further ones of a hostile log are not understood."""
_ACCESS = rb'(?:\[[\d:. -]+\] )?(?:INFO: +)?\S+ - "[A-Z?]+ [^"\n]*" [1-4]\d\d\b.*'
"""Lines about answered requests: most lines of many logs, and of no interest. The reason of a
refused request may quote anything, even a batch line."""
_EMPTY = re.compile(rb"\n{2,}")
_FIXED_GROUPS = 3  # stamp, fraction, rank


@dataclass(slots=True)
class ShapeMatches:
    """The lines of one shape in one block."""

    shape: Shape
    lines: list[int] = field(default_factory=list)
    """Their numbers within the block, from 0, ascending."""
    columns: list[tuple[bytes, ...]] = field(default_factory=list)
    """The groups of the shape's pattern, each with a value for every line."""


@dataclass(slots=True)
class Scanned:
    found: list[ShapeMatches]
    rest: list[tuple[int, bytes]]
    """Lines that report no batch, with their numbers within the block."""
    num_lines: int
    not_understood: list[tuple[int, bytes]] = field(default_factory=list)
    """Lines that report a batch, but not in a form that can be read."""


@dataclass(slots=True)
class _New:
    """A shape that was not known before this block."""

    pattern: re.Pattern[bytes]
    found: ShapeMatches
    rows: list[tuple[bytes, ...]] = field(default_factory=list)


class Scanner:
    def __init__(self) -> None:
        self._shapes: list[Shape] = []
        self._all = re.compile(rb"(?m)^(?:" + _ACCESS + rb"|(.*))$")

    def scan(self, block: bytes) -> Scanned:
        if b"\n\n" not in block:
            return self._scan(block)
        # Empty lines mean nothing, and there may be millions of them.
        lines = block.split(b"\n")
        filled = [number for number, line in enumerate(lines) if line]
        scanned = self._scan(_EMPTY.sub(b"\n", block).strip(b"\n"))
        if not filled:
            return Scanned([], [], len(lines))
        for found in scanned.found:
            found.lines = [filled[number] for number in found.lines]
        scanned.rest = [(filled[number], line) for number, line in scanned.rest]
        scanned.not_understood = [(filled[number], line) for number, line in scanned.not_understood]
        scanned.num_lines = len(lines)
        return scanned

    def _scan(self, block: bytes) -> Scanned:
        rows = self._all.findall(block)
        columns = list(zip(*rows, strict=True)) if self._shapes else [tuple(rows)]
        found, start = [], 0
        for shape in self._shapes:
            end = start + _FIXED_GROUPS + len(shape.names)
            # The first field of a line that has this shape is not empty.
            mark = columns[start + (1 if shape.stamp_is_last else _FIXED_GROUPS)]
            lines = [number for number, value in enumerate(mark) if value]
            if len(lines) == len(rows):
                found.append(ShapeMatches(shape, lines, columns[start:end]))
            elif lines:
                parts = [tuple(compress(column, mark)) for column in columns[start:end]]
                found.append(ShapeMatches(shape, lines, parts))
            start = end
        rest = [(number, line[:MAX_LINE]) for number, line in enumerate(columns[-1]) if line]
        scanned = Scanned(found, rest, len(rows))
        if any(b"#" in line for _, line in rest):
            self._learn(scanned)
        return scanned

    def _learn(self, scanned: Scanned) -> None:
        """Sort out the batch lines of shapes that were not known before this block."""
        new: list[_New] = []
        rest: list[tuple[int, bytes]] = []
        for number, line in scanned.rest:
            if b"#" not in line or not looks_like_batch(line):
                rest.append((number, line))
                continue
            row = self._match(new, line)
            if row is None:
                shape = shape_of(line) if self._has_room(new) else None
                if shape is not None:
                    pattern = re.compile(shape.pattern)
                    new.append(_New(pattern, ShapeMatches(shape)))
                    row = self._match(new, line)
                if row is None:
                    scanned.not_understood.append((number, line))
                    continue
            each, values = row
            each.found.lines.append(number)
            each.rows.append(values)
        if not new:
            scanned.rest = rest
            return
        scanned.rest = rest
        for each in new:
            each.found.columns = list(zip(*each.rows, strict=True))
        new = [each for each in new if each.rows]
        scanned.found += [each.found for each in new]
        self._shapes += [each.found.shape for each in new]
        one = rb"|".join(shape.pattern for shape in self._shapes)
        self._all = re.compile(rb"(?m)^(?:" + _ACCESS + rb"|" + one + rb"|(.*))$")

    def _has_room(self, new: list[_New]) -> bool:
        shapes = [*self._shapes, *(each.found.shape for each in new)]
        return len(shapes) < MAX_SHAPES and sum(len(each.names) for each in shapes) < MAX_GROUPS

    @staticmethod
    def _match(patterns: list[_New], line: bytes) -> tuple[_New, tuple[bytes, ...]] | None:
        for each in patterns:
            match = each.pattern.fullmatch(line)
            if match is not None:
                return each, match.groups(b"")
        return None
