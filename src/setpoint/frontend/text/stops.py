"""Finds stop strings in text that arrives in pieces, some of which the client is not shown.

Works on strings only. The caller knows which token a piece came from, and what a match means for
the request.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Feeds text through, holding back the tail that may be the start of a stop string.

    Contract: what ``feed`` and ``flush`` return, joined, is the text up to the first stop string
    (including it if ``keep``), without the hidden pieces (special tokens), which are searched like
    all others. The first is the one that is complete first, and the longest of those, so the result
    does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""
        self._hidden: list[tuple[int, int]] = []
        """The parts of ``_held`` that are hidden: start and end, in order."""
        self.matched: str | None = None
        """The stop string that was found; nothing may be fed after that."""

    def feed(self, text: str, *, hidden: bool = False) -> str:
        """Add a piece; returns the shown text that is certain not to belong to a stop string. Sets
        ``matched`` when a match is complete."""
        assert self.matched is None, "text after a stop string"
        if hidden:
            self._hidden.append((len(self._held), len(self._held) + len(text)))
        self._held += text
        match = self._first_match(self._held)
        if match is None:
            return self._release(self._partial_match(self._held))
        start, self.matched = match
        return self._release(start + len(self.matched) if self._keep else start)

    def flush(self) -> str:
        """End the text; returns the shown part of what was held back, which is no stop string after
        all."""
        return self._release(len(self._held))

    def _release(self, end: int) -> str:
        """Release the held text before ``end``, and return its shown part; the rest stays held."""
        shown, at = "", 0
        for start, stop in self._hidden:
            shown += self._held[at : min(start, end)]
            at = min(stop, end)
        shown += self._held[at:end]
        self._held = self._held[end:]
        self._hidden = [
            (max(start - end, 0), stop - end) for start, stop in self._hidden if stop > end
        ]
        return shown

    def _first_match(self, text: str) -> tuple[int, str] | None:
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _partial_match(self, text: str) -> int:
        """Where the longest tail begins that is a proper prefix of some stop string; len(text) if
        none is."""
        earliest = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < earliest:
                if stop.startswith(text[start:]):
                    earliest = start
                    break
                start = text.find(stop[0], start + 1)
        return earliest
