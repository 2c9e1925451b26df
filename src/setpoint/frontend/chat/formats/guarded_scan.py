"""Follows the JSON arguments of a call, which markers of the format may end before they are
complete: behind a string or a bracket that the model has not closed comes no other call's text."""

from __future__ import annotations

from typing import Protocol

from setpoint.frontend.chat.formats.json_scan import JsonScan, Scan
from setpoint.frontend.chat.formats.scanning import Markers, is_cut

_AFTER_STRING = ",:}]"
_WINDOW = 1024
"""Characters in which markers are looked for at once, so that a short value in a long text costs
little."""


class StringScan(Scan, Protocol):
    """A scan that knows whether the text it has read ends in a string."""

    @property
    def is_in_string(self) -> bool: ...


class TellingScan(StringScan, Protocol):
    """A scan that keeps the text between arguments which is no part of them."""

    def told(self, *, ended: bool) -> str:
        """The text between arguments that was kept. ended: the answer has ended in the arguments,
        so the beginning of a key is only cut off."""
        ...


class GuardedScan:
    """Implements Scan. A marker outside of a string ends the arguments. One in a string is part of
    it, if the quote that closes the string is followed by what JSON allows there."""

    def __init__(
        self, markers: Markers, scan: StringScan | None = None, *, quote: str = '"'
    ) -> None:
        """scan: reads arguments that are not JSON, whose strings ``quote`` ends."""
        self.is_done = False
        self.taken_back = ""
        self._scan: StringScan = scan or JsonScan()
        self._markers = markers
        self._quote = quote
        self._held: list[str] = []
        """The text from a marker in a string on."""
        self._is_closed = False
        """Whether the held text ends with a quote that may close the string, or behind it."""
        self._escapes = False
        """Whether the held text ends in the middle of an escape."""

    @property
    def is_broken(self) -> bool:
        """Whether the arguments have ended before they were complete."""
        return self.is_done and not self._scan.is_done

    def feed(self, text: str, at: int) -> tuple[str, int]:
        parts: list[str] = []
        before = -1
        while at != before and at < len(text) and not self.is_done:
            before = at
            at = self._hold(text, at, parts) if self._held else self._read(text, at, parts)
        return "".join(parts), at

    def end(self) -> str:
        """The answer has ended: the JSON that has been held back."""
        held = "".join(self._held)
        if not held:
            return ""
        marker = self._markers.find(held, 0)
        behind = held[marker.end() :].lstrip() if marker is not None else ""
        other = self._markers.find(behind, 0)
        if not behind or (other is not None and not other.start()):
            self._take_back(held)
            return ""
        self._held = []
        return self._scan.feed(held, 0)[0]

    def _read(self, text: str, at: int, parts: list[str]) -> int:
        if not at and not self._markers.may_begin_in(text):
            part, at = self._scan.feed(text, 0)
            parts.append(part)
            self.is_done = self._scan.is_done
            return at
        limit = at + _WINDOW
        found = self._markers.find(text, at, limit + self._markers.longest)
        stop = min(limit, self._markers.cut(text, at)) if found is None else found.start()
        part, used = self._scan.feed(text[at:stop], 0)
        parts.append(part)
        at += used
        self.is_done = self._scan.is_done
        if self.is_done or found is None:
            return at
        if (
            at < stop and self._scan.is_in_string
        ):  # an escape that ends with the first character of the marker
            part, used = self._scan.feed(text[at : stop + 1], 0)
            parts.append(part)
            return at + used
        if self._scan.is_in_string:
            self._held = [found.group()]
            self._is_closed = self._escapes = False
            return found.end()
        self.is_done = True
        return at

    def _hold(self, text: str, at: int, parts: list[str]) -> int:
        if not self._is_closed:
            start = at
            while at < len(text) and not self._is_closed:
                sign = text[at]
                if is_cut(text, at, self._quote) and len(self._quote) > 1:
                    break
                self._is_closed = text.startswith(self._quote, at) and not self._escapes
                self._escapes = sign == "\\" and not self._escapes and len(self._quote) == 1
                at += len(self._quote) if self._is_closed else 1
            self._held.append(text[start:at])
            return at
        start = at
        while at < len(text) and text[at].isspace():
            at += 1
        self._held.append(text[start:at])
        if at == len(text):
            return at
        held = "".join(self._held)
        if text[at] in _AFTER_STRING:
            self._held = []
            parts.append(self._scan.feed(held, 0)[0])
            return self._read(text, at, parts)
        self._take_back(held)
        return at

    def _take_back(self, held: str) -> None:
        self._held = []
        self.taken_back = held
        self.is_done = True
