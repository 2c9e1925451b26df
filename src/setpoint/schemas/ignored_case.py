"""Writes regular expressions that ignore the case of letters ((?i)) without that flag.

To the grammar libraries the flag means Unicode's rules, by which ``(?i)[a-z]`` and ``(?i)\\w``
match the long s (U+017F) and the sign of the kelvin (U+212A). Here a letter stands for the same
letters as in ECMA-262, on which JSON Schema builds: those with the same capital letter, where no
letter outside of ASCII has one inside.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from functools import cache

from setpoint.core.errors import RequestError

_USED = re.compile(r"(?<!\\)(?:\\\\)*\(\?[a-zA-Z]*i")
_GROUP = re.compile(r"\(\?(?P<on>[a-zA-Z]*)(?:-(?P<off>[a-zA-Z]+))?(?P<kind>[:)])")
_NAMED = re.compile(r"\(\?(?:P?<\w+>|P?[<=!>#])|\(")
POSIX = re.compile(r"\[:\^?\w+:\]")
ESCAPE = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})"
    r"|[xuU]\{(?P<braced>[0-9a-fA-F]{1,6})\}|[pP](?:\{[^}]*\}|.)|.)",
    re.DOTALL,
)
_END_OF_CASED = 0x1E944
"""No character from here on has a capital letter."""
OPENING = re.compile(r"\[\^?\]?")
_ONE_CASE = re.compile("upper|lower")
MAX_EXAMINED = 1 << 18
"""Most letters in all ranges of an expression."""
_UNICODE_CLASS = re.compile(r"\\[pP]")


def with_case_ignored(pattern: str) -> str:
    """The same expression without the flag; itself if it has none. Raises RequestError (400) for
    the flag x beside it, with which the text has another meaning."""
    if _USED.search(pattern) is None:
        return pattern
    return _Reader(pattern).written()


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._out: list[str] = []
        self._num_examined = 0

    def written(self) -> str:
        text, out = self._text, self._out
        ignores, outer = False, list[bool]()
        while self._at < len(text):
            character = text[self._at]
            if found := _GROUP.match(text, self._at):
                self._at = found.end()
                on, off = found["on"], found["off"] or ""
                if "x" in on:
                    raise RequestError("the flags i and x cannot be combined in an expression")
                if found["kind"] == ":":
                    outer.append(ignores)
                ignores = (ignores or "i" in on) and "i" not in off
                out.append(_group(on.replace("i", ""), off.replace("i", ""), found["kind"]))
            elif character == "(":
                outer.append(ignores)
                self._copy(_NAMED)
            elif character == "[":
                self._class(ignores)
            elif character == "\\":
                self._escape(ignores)
            else:
                self._at += 1
                if character == ")" and outer:
                    ignores = outer.pop()
                others = _others(ord(character)) if ignores else ""
                out.append(f"[{character}{others}]" if others else character)
        return "".join(out)

    def _copy(self, kind: re.Pattern[str]) -> str:
        found = kind.match(self._text, self._at)
        copied = self._text[self._at] if found is None else found[0]
        self._at += len(copied)
        self._out.append(copied)
        return copied

    def _escape(self, ignores: bool) -> None:
        escape = self._copy(ESCAPE)
        if not ignores:
            return
        if escape[:2] in ("\\p", "\\P"):
            self._out[-1] = f"(?i:{escape})"  # whoever writes these means Unicode
        elif others := _others(code_point(escape)):
            self._out[-1] = f"[{escape}{others}]"

    def _class(self, ignores: bool) -> None:
        """Copy a class. Before each character and range in it, write the others that it stands for:
        behind it they could become the beginning of a range."""
        begin, first = self._at, len(self._out)
        depth, low, low_at, is_range = 0, -1, 0, False
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "[" and not (depth and POSIX.match(self._text, self._at)):
                depth, low = depth + 1, -1
                self._copy(OPENING)
            elif character == "[":
                name = self._copy(POSIX)
                if ignores:
                    self._out[-1] = _ONE_CASE.sub("alpha", name)
            elif character == "]":
                self._take()
                depth, low = depth - 1, -1
                if depth == 0:
                    break
            elif low >= 0 and self._is_range():
                self._take()
                is_range = True
                continue
            else:
                item = self._copy(ESCAPE) if character == "\\" else self._take()
                code = ord(item) if len(item) == 1 else code_point(item)
                at = low_at if is_range else len(self._out) - 1
                if ignores and code >= 0 and (is_range or not self._is_range()):
                    others = self._others_of_range(low, code) if is_range else _others(code)
                    self._out[at] = others + self._out[at]
                low, low_at = (-1 if is_range else code), at
            is_range = False
        if ignores and _UNICODE_CLASS.search(self._text, begin, self._at):
            self._out[first:] = [f"(?i:{self._text[begin : self._at]})"]

    def _is_range(self) -> bool:
        """Whether a hyphen between two characters comes next."""
        text, at = self._text, self._at
        return text.startswith("-", at) and not text.startswith(("-]", "--"), at)

    def _others_of_range(self, low: int, high: int) -> str:
        cased, alike = _cased()
        codes = cased[bisect_left(cased, low) : bisect_right(cased, high)]
        self._num_examined += len(codes)
        if self._num_examined > MAX_EXAMINED:
            raise RequestError("an expression has too many ranges of letters whose case is ignored")
        found = {other for code in codes for other in alike[code] if not low <= other <= high}
        return "".join(map(chr, sorted(found)))

    def _take(self) -> str:
        taken = self._text[self._at]
        self._at += 1
        self._out.append(taken)
        return taken


def _group(on: str, off: str, kind: str) -> str:
    if not on and not off:
        return "(?:" if kind == ":" else ""
    return f"(?{on}{'-' if off else ''}{off}{kind}"


def code_point(escape: str) -> int:
    """The character that an escape names; -1 for a class, and for other escapes with a letter."""
    found = ESCAPE.fullmatch(escape)
    assert found is not None
    digits = found["x"] or found["u"] or found["U"] or found["braced"]
    if digits:
        return int(digits, 16)
    return -1 if escape[1].isalnum() else ord(escape[1])


def _others(code: int) -> str:
    """The other characters that a character stands for, as they are written in a class."""
    return "".join(map(chr, _cased()[1].get(code, ())))


@cache
def _cased() -> tuple[list[int], dict[int, list[int]]]:
    """The characters that stand for others, in order, and for each the others."""
    groups: dict[str, list[int]] = {}
    for code in range(_END_OF_CASED):
        letter = chr(code)
        if letter.swapcase() == letter:
            continue
        capital = letter.upper()
        if len(capital) > 1 or (code > 127 and capital < "\x80"):
            capital = letter
        groups.setdefault(capital, []).append(code)
    alike = {
        code: [other for other in group if other != code]
        for group in groups.values()
        if len(group) > 1
        for code in group
    }
    return sorted(alike), alike
