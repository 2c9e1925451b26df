"""The two things that every parser of a stream does with text whose meaning is not certain yet: it
looks for markers that may be cut, and holds back whitespace that a marker may follow."""

from __future__ import annotations

import re
import sys

MAX_NAME_CHARS = 256
"""Longest name of a function or argument; longer text in its place is no call. Keeps what a parser
holds back short."""


def is_cut(text: str, at: int, marker: str) -> bool:
    """Whether the text ends in the middle of a marker that begins at ``at``, or just there."""
    return len(text) - at < len(marker) and marker.startswith(text[at:])


class Markers:
    """Finds whichever of several markers comes first. Where one marker is the beginning of
    another, the longer one counts."""

    def __init__(self, *markers: str) -> None:
        self._markers = sorted(markers, key=len, reverse=True)
        any_marker = "|".join(re.escape(marker) for marker in self._markers)
        self._pattern = re.compile(any_marker or "(?!)")
        self._heads = frozenset(marker[0] for marker in markers)
        self.longest = max(map(len, markers), default=0)

    def find(self, text: str, at: int, until: int = sys.maxsize) -> re.Match[str] | None:
        """The first marker that lies between the two indices."""
        return self._pattern.search(text, at, until)

    def cut(self, text: str, at: int) -> int:
        """The index of a possible marker that the end of the text cuts off, or the length of the
        text if there is none. Meaningful only where ``find`` finds no marker."""
        for index in range(max(at, len(text) - self.longest + 1), len(text)):
            if text[index] in self._heads:
                tail = text[index:]
                if any(marker.startswith(tail) for marker in self._markers):
                    return index
        return len(text)

    def may_begin_in(self, text: str) -> bool:
        return not self._heads.isdisjoint(text)


class Trimmed:
    """Passes text on without the whitespace at its end, and without that at its start if
    ``at_start``. Where ``interrupt`` divides the text, the whitespace before stays and that after
    goes."""

    def __init__(self, *, at_start: bool) -> None:
        self._skipping = at_start
        self._held: list[str] = []

    def feed(self, text: str) -> str:
        """The text that is certain to be passed on."""
        if self._skipping:
            text = text.lstrip()
            if not text:
                return ""
            self._skipping = False
        kept = text.rstrip()
        if not kept:
            if text:
                self._held.append(text)
            return ""
        if len(kept) == len(text) and not self._held:
            return text
        passed = "".join(self._held) + kept
        self._held = [text[len(kept) :]] if len(kept) < len(text) else []
        return passed

    def is_passing(self, text: str) -> bool:
        """Whether ``feed`` would return the text unchanged; the text is not empty."""
        return not self._held and not self._skipping and not text[-1].isspace()

    def interrupt(self) -> None:
        self._skipping = True

    def last(self) -> str:
        """The whitespace at the end; none after an interruption."""
        return "" if self._skipping else "".join(self._held)
