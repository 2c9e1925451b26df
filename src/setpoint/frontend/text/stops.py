"""Finds stop strings and stop expressions in text that arrives in pieces, some of which the client
is not shown.

Works on strings only. The caller knows which token a piece came from, and what a match means for
the request.
"""

from __future__ import annotations

from collections.abc import Sequence

from setpoint.frontend.text.stop_regex import StopSearch, compile_expressions


class StopFinder:
    """Feeds text through, holding back the tail that may be the start of a stop: a stop string, or
    a match of a stop expression.

    Contract: what ``feed`` and ``flush`` return, joined, is the text up to the first stop
    (including it if ``keep``), without the hidden pieces (special tokens), which are searched like
    all others. The first is the one that is complete first, and the longest of those, so the result
    does not depend on how the text is cut into pieces.
    """

    def __init__(
        self, stops: Sequence[str], *, regexes: tuple[str, ...] = (), keep: bool = False
    ) -> None:
        """regexes: expressions that ``stop_regex.compile_expressions`` accepts."""
        self._stops = tuple(stops)
        self._regexes = regexes
        self._search = StopSearch(compile_expressions(regexes)) if regexes else None
        self._released = 0
        """Number of characters before ``_held``."""
        self._keep = keep
        self._held = ""
        self._hidden: list[tuple[int, int]] = []
        """The parts of ``_held`` that are hidden: start and end, in order."""
        self.matched: str | None = None
        """The stop string or the expression that was found; nothing may be fed after that."""

    def feed(self, text: str, *, hidden: bool = False) -> str:
        """Add a piece; returns the shown text that is certain not to belong to a stop string. Sets
        ``matched`` when a match is complete."""
        assert self.matched is None, "text after a stop string"
        if hidden:
            self._hidden.append((len(self._held), len(self._held) + len(text)))
        self._held += text
        matches = self._matches(text)
        if not matches:
            return self._release(self._partial_match(self._held))
        end, start, _, self.matched = min(matches)
        return self._release(end if self._keep else start)

    @property
    def num_held(self) -> int:
        """Number of characters that are held back, less those that are hidden."""
        return len(self._held) - sum(stop - start for start, stop in self._hidden)

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
        self._released += end
        self._hidden = [
            (max(start - end, 0), stop - end) for start, stop in self._hidden if stop > end
        ]
        return shown

    def _matches(self, new: str) -> list[tuple[int, int, int, str]]:
        """Every stop's first match in the held text, of which ``new`` is the last piece: its end,
        its start, its kind, and the stop."""
        matches = [
            (start + len(stop), start, 0, stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if self._search is not None:
            self._search.feed(new)
            if self._search.matched is not None:
                start, end, index = self._search.matched
                matches.append(
                    (end - self._released, start - self._released, 1, self._regexes[index])
                )
        return matches

    def _partial_match(self, text: str) -> int:
        """The place where the longest tail begins that may become a stop; len(text) if none may."""
        earliest = len(text)
        if self._search is not None:
            earliest = self._search.certain - self._released
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < earliest:
                if stop.startswith(text[start:]):
                    earliest = start
                    break
                start = text.find(stop[0], start + 1)
        return earliest
