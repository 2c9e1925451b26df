"""Reads one call written as a JSON object that has the function's name and the arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from setpoint.frontend.chat.formats.arguments_text import arguments_object, decoded_string
from setpoint.frontend.chat.formats.guarded_scan import GuardedScan
from setpoint.frontend.chat.formats.scanning import MAX_NAME_CHARS, Markers

ARGUMENTS = ("arguments", "parameters")
_KEYS = (*ARGUMENTS, "name", "type", "id")

Outcome = Literal["more", "done", "broken"]


class JsonCall:
    """Reads ``{"name": …, "arguments": {…}}``, the keys in any order and among others. It tells of
    the call as soon as that is certain: the name is known and the arguments begin. Arguments that
    are no object (``arguments_object``) are passed on as they are, and the call is not whole."""

    def __init__(
        self,
        begin: Callable[[str], None],
        argue: Callable[[str], None],
        *,
        names: Collection[str] | None = None,
        markers: Markers,
    ) -> None:
        """begin: called with the name. argue: called after that with each piece of the arguments.
        names: if not None, an object that names another function, or has keys that no call has, is
        no call; so other JSON is not held back for long. markers: what ends arguments that are
        not complete."""
        self.has_begun = False
        self._begin = begin
        self._argue = argue
        self._names = names
        self._expected: Literal["{", "key", ":", "value", ","] = "{"
        self.taken_back = ""
        """Text that has been read, but is no more of the call."""
        self._markers = markers
        self._scan: GuardedScan | None = None
        """Reads the present key or value."""
        self._streams = False
        """Whether the present value goes to ``argue`` as it comes."""
        self._parts: list[str] = []
        self._raw: list[str] = []
        self._key = ""
        self._name = ""
        self._arguments = ""
        """Arguments that came before the name."""
        self._is_cut = False
        """Whether the arguments are no object."""
        self._has_others = False
        """Whether there are keys that no call has."""

    @property
    def is_whole(self) -> bool:
        """Whether the call has begun and its arguments are complete."""
        return self.has_begun and not self._streams and not self._is_cut

    def raw(self) -> str:
        """The text read so far if the call has not begun, so that it is no call."""
        return "".join(self._raw).removesuffix(self.taken_back)

    def feed(self, text: str, at: int) -> tuple[Outcome, int]:
        """Read on. The second result is where the next text to read begins; "broken" means that no
        call, or no more of one, is there."""
        while at < len(text):
            start = at
            if self._scan is not None:
                part, at = self._scan.feed(text, at)
                self._keep(text[start:at])
                if self._streams:
                    self._argue(part)
                else:
                    self._parts.append(part)
                if not self._scan.is_done:
                    return "more", at
                if self._scan.is_broken:
                    self._break_off()
                    return "broken", at
                if not self._end_scan():
                    return "broken", at
            elif text[at].isspace():
                at += 1
                self._keep(text[start:at])
            else:
                outcome, at = self._sign(text, at)
                self._keep(text[start:at])
                if outcome != "more":
                    return outcome, at
        return "more", at

    def end(self) -> Outcome:
        """The answer has ended in the call."""
        if self._scan is None:
            return "more"
        part = self._scan.end()
        if self._streams:
            self._argue(part)
        else:
            self._parts.append(part)
        is_broken = self._scan.is_broken
        self._break_off()
        return "broken" if is_broken else "more"

    def _break_off(self) -> None:
        """The present key or value does not end."""
        assert self._scan is not None, "it has begun"
        self.taken_back = self._scan.taken_back
        value = "".join(self._parts)
        if self._is_argument and self._name and value and not self.has_begun:
            self._is_cut = True
            self._begin_call()
            self._argue(value)

    @property
    def _is_argument(self) -> bool:
        """Whether the present value is the arguments."""
        return self._expected == "value" and self._key in ARGUMENTS

    def _keep(self, raw: str) -> None:
        if not self.has_begun:
            self._raw.append(raw)

    def _sign(self, text: str, at: int) -> tuple[Outcome, int]:
        """The character at ``at`` stands between keys and values, or begins one."""
        sign = text[at]
        if self._expected == "value":
            self._start_value(sign)
        elif self._expected == "key" and sign == '"':
            self._scan = GuardedScan(self._markers)
        elif sign == "}" and self._expected in ("key", ","):
            return ("done" if self._end_object() else "broken"), at + 1
        elif sign == self._expected:
            self._expected = "value" if sign == ":" else "key"
            return "more", at + 1
        else:
            return "broken", at
        return "more", at

    def _start_value(self, sign: str) -> None:
        self._scan = GuardedScan(self._markers)
        if sign == "{" and self._name and self._is_argument and not self.has_begun:
            self._streams = True
            self._begin_call()

    def _end_scan(self) -> bool:
        """A key or value is complete. Whether it may be part of a call."""
        value = "".join(self._parts)
        self._parts.clear()
        self._scan = None
        if self._expected == "key":
            self._key = decoded_string(value) or ""
            self._expected = ":"
            self._has_others |= self._key not in _KEYS
            return self._names is None or self._key in _KEYS
        self._expected = ","
        if self._streams:
            self._streams = False
            return True
        if self.has_begun:
            return True
        if self._key == "name":
            self._name = decoded_string(value) or ""
            if not 0 < len(self._name) <= MAX_NAME_CHARS:
                return False
            if self._names is not None and self._name not in self._names:
                return False
        elif self._key in ARGUMENTS:
            if not value:
                return False
            found = arguments_object(value)
            self._is_cut = not found
            self._arguments = found or value
        if self._name and self._arguments:
            self._begin_call()
            self._argue(self._arguments)
        return True

    def _end_object(self) -> bool:
        if not self.has_begun:
            if not self._name or self._has_others:
                return False  # what the other keys have may be the arguments
            self._begin_call()
            self._argue("{}")
        return True

    def _begin_call(self) -> None:
        self.has_begun = True
        self._begin(self._name)
