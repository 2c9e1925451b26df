"""Follows one JSON value through the pieces of a stream: where it ends, and which text of it may be
passed on. It trusts the value to be valid and never raises."""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

from setpoint.frontend.chat.formats.bare_words import MAX_NUMBER_CHARS, json_word

_STRUCTURE = re.compile(r'["{}\[\]]')
_PLAIN = re.compile(r'[^"\\]+')
_CONTROL = re.compile(r"[\x00-\x1f]")
_WORD = re.compile(r"[^\s:,]++")
_NO_WORD = " \t\r\n:,"
_BARE_END = re.compile(r"[\s,\]}]")
_LOW_HALF = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HIGH_HALF = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf"{_HIGH_HALF}{_LOW_HALF}|\\.", re.DOTALL)
_CUT_ESCAPE = re.compile(
    rf"(?:\\|\\u[0-9a-fA-F]{{0,3}}|{_HIGH_HALF}(?:\\|\\u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)\Z"
)


class Scan(Protocol):
    """Reads the arguments of a call in a stream, and makes JSON of them."""

    @property
    def is_broken(self) -> bool:
        """Whether the arguments have ended before they were complete."""
        ...

    is_done: bool
    taken_back: str
    """Text that has been read, but turns out to stand behind the arguments."""

    def feed(self, text: str, at: int) -> tuple[str, int]:
        """The next text of the JSON, which never ends inside an escape, and the index after the
        text that it was made of."""
        ...

    def end(self) -> str:
        """The JSON of text that has been held back, at the end of the answer."""
        ...


class JsonScan:
    """Reads one value, from its first character on."""

    is_broken = False
    taken_back = ""

    def __init__(self) -> None:
        self.is_done = False
        self._kind = ""
        """The value's first character."""
        self._depth = 0
        self._in_string = False

    @property
    def is_in_string(self) -> bool:
        return self._in_string

    def feed(self, text: str, at: int) -> tuple[str, int]:
        """Like ``Scan.feed``. Characters that models leave as they are in strings but that JSON
        must escape, such as line ends, come out escaped, and numbers in other notations as JSON's.
        """
        parts: list[str] = []
        if not self._kind:
            self._kind = text[at : at + 1]
        while at < len(text) and not self.is_done:
            if self._in_string:
                stop = self._string(text, at, parts)
                if stop == at:
                    break
                at = stop
            elif self._kind in '"{[':
                stop = self._structure(text, at, parts)
                if stop == at:
                    break
                at = stop
            else:
                found = _BARE_END.search(text, at)
                stop = len(text) if found is None else found.start()
                parts.append(text[at:stop])
                self.is_done = found is not None
                at = stop
        return "".join(parts), at

    def end(self) -> str:
        return ""

    def _structure(self, text: str, at: int, parts: list[str]) -> int:
        found = _STRUCTURE.search(text, at)
        stop = len(text) if found is None else found.start()
        if found is None:  # a word that may go on is held back
            least = max(at, stop - MAX_NUMBER_CHARS)
            while stop > least and text[stop - 1] not in _NO_WORD:
                stop -= 1
        parts.append(_WORD.sub(_as_json, text[at:stop]))
        if found is None:
            return stop
        sign = found.group()
        if sign == '"':
            self._in_string = True
        else:
            self._depth += 1 if sign in "{[" else -1
            self.is_done = self._depth <= 0
        parts.append(sign)
        return found.end()

    def _string(self, text: str, at: int, parts: list[str]) -> int:
        plain = _PLAIN.match(text, at)
        if plain is not None:
            parts.append(_CONTROL.sub(_escaped, plain.group()))
            return plain.end()
        if text[at] == '"':
            self._in_string = False
            self.is_done = not self._depth
            parts.append('"')
            return at + 1
        if _CUT_ESCAPE.match(text, at):
            return at
        escape = _ESCAPE.match(text, at)
        assert escape is not None, "a lone backslash is a cut escape"
        parts.append(escape.group())
        return escape.end()


def _as_json(word: re.Match[str]) -> str:
    return json_word(word.group()) or word.group()


def _escaped(control: re.Match[str]) -> str:
    return f"\\u{ord(control.group()):04x}"


def json_text(value: Any) -> str:
    """The value as JSON text. Raises ValueError for what JSON cannot represent, such as
    infinity."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair can be in a string, but not in UTF-8.
    return text if _is_utf8(text) else json.dumps(value, allow_nan=False)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
