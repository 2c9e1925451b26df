"""Applies the patterns of all known shapes to a block at once: one pass in the regular expression
engine's C code finds every batch line of known shape; the other lines are looked at one by one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from setpoint.advisor.doctor.readers.log.batch_lines import Shape, looks_like_batch, shape_of
from setpoint.advisor.doctor.readers.log.stream import MAX_LINE

MAX_SHAPES = 48
"""A log has a handful. Further ones of a hostile log are not understood."""
_ACCESS = rb'(?:\[[\d:. -]+\] )?INFO: +\S+ - "[A-Z]+ [^"\n]*" [1-4]\d\d\b.*'
"""Requests that were answered: most lines of many logs, and of no interest."""
_FIXED_GROUPS = 3  # stamp, fraction, rank


@dataclass(slots=True)
class Found:
    """The lines of one shape in one block."""

    shape: Shape
    lines: list[int] = field(default_factory=list)
    """Their numbers within the block, from 0, ascending."""
    rows: list[tuple[bytes, ...]] = field(default_factory=list)
    """The groups of the shape's pattern."""


@dataclass(slots=True)
class Scanned:
    found: list[Found]
    rest: list[tuple[int, bytes]]
    """Lines that report no batch, with their numbers within the block."""
    num_lines: int
    not_understood: list[tuple[int, bytes]] = field(default_factory=list)
    """Lines that report a batch, but not in a form that can be read."""


class Scanner:
    def __init__(self) -> None:
        self._shapes: list[Shape] = []
        self._all = re.compile(rb"(?m)^(?:" + _ACCESS + rb"|(.*))$")

    def scan(self, block: bytes) -> Scanned:
        rows = self._all.findall(block)
        found, start = [], 0
        for shape in self._shapes:
            end = start + _FIXED_GROUPS + len(shape.names)
            # The first field of a line that has this shape is not empty.
            mark = start + (1 if shape.stamp_is_last else _FIXED_GROUPS)
            lines = [number for number, row in enumerate(rows) if row[mark]]
            if lines:
                of_shape = [row[start:end] for row in rows if row[mark]]
                found.append(Found(shape, lines, of_shape))
            start = end
        if start:
            rest = [(number, row[-1][:MAX_LINE]) for number, row in enumerate(rows) if row[-1]]
        else:
            rest = [(number, line[:MAX_LINE]) for number, line in enumerate(rows) if line]
        scanned = Scanned(found, rest, len(rows))
        if any(b"#" in line for _, line in rest):
            self._learn(scanned)
        return scanned

    def _learn(self, scanned: Scanned) -> None:
        """Sort out the batch lines of shapes that were not known before this block."""
        new: list[tuple[re.Pattern[bytes], Found]] = []
        rest: list[tuple[int, bytes]] = []
        for number, line in scanned.rest:
            if b"#" not in line or not looks_like_batch(line):
                rest.append((number, line))
                continue
            row = self._match(new, line)
            if row is None:
                shape = shape_of(line) if len(self._shapes) + len(new) < MAX_SHAPES else None
                if shape is not None:
                    pattern = re.compile(shape.pattern)
                    new.append((pattern, Found(shape)))
                    row = self._match(new, line)
                if row is None:
                    scanned.not_understood.append((number, line))
                    continue
            found, values = row
            found.lines.append(number)
            found.rows.append(values)
        if not new:
            scanned.rest = rest
            return
        scanned.rest = rest
        scanned.found += [found for _, found in new]
        self._shapes += [found.shape for _, found in new]
        one = rb"|".join(shape.pattern for shape in self._shapes)
        self._all = re.compile(rb"(?m)^(?:" + one + rb"|" + _ACCESS + rb"|(.*))$")

    @staticmethod
    def _match(
        patterns: list[tuple[re.Pattern[bytes], Found]], line: bytes
    ) -> tuple[Found, tuple[bytes, ...]] | None:
        for pattern, found in patterns:
            match = pattern.fullmatch(line)
            if match is not None:
                return found, match.groups(b"")
        return None
