"""Counts the characters that code looks at or copies, so that a test can tell linear from quadratic
work without a clock."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from setpoint.frontend.chat.formats.scanning import Markers


class Work:
    """The characters so far."""

    def __init__(self) -> None:
        self.num_chars = 0

    def spend(self, num_chars: int) -> None:
        self.num_chars += max(num_chars, 1)

    def text(self, text: str) -> CountedText:
        counted = CountedText(text)
        counted.work = self
        return counted


class CountedText(str):
    """A text whose slices, sums and searches are counted. Of a joined text only what is done to it
    later together with another counted text is."""

    work: Work

    def _counted(self, text: str, num_chars: int | None = None) -> CountedText:
        self.work.spend(len(text) if num_chars is None else num_chars)
        return self.work.text(text)

    def __getitem__(self, key: Any) -> str:
        found = str.__getitem__(self, key)
        return self._counted(found) if isinstance(key, slice) else found

    def __add__(self, other: str) -> str:
        return self._counted(str.__add__(self, other))

    def __radd__(self, other: str) -> str:
        return self._counted(str.__add__(other, self))

    def __contains__(self, part: object) -> bool:
        self.work.spend(len(self))
        return str.__contains__(self, part)  # type: ignore[arg-type]

    def find(self, part: str, *place: Any) -> int:
        found = str.find(self, part, *place)
        begin, end, _ = (
            slice(*(*place, None)[:2]).indices(len(self)) if place else (0, len(self), 1)
        )
        self.work.spend((found + len(part) if found >= 0 else end) - begin)
        return found

    def startswith(self, prefix: Any, *place: Any) -> bool:
        self.work.spend(len(prefix))
        return str.startswith(self, prefix, *place)

    def endswith(self, suffix: Any, *place: Any) -> bool:
        self.work.spend(len(suffix))
        return str.endswith(self, suffix, *place)

    def strip(self, chars: str | None = None) -> str:
        return self._counted(str.strip(self, chars), len(self))

    def lstrip(self, chars: str | None = None) -> str:
        return self._counted(str.lstrip(self, chars))

    def rstrip(self, chars: str | None = None) -> str:
        return self._counted(str.rstrip(self, chars))


class CountedPattern:
    """A pattern whose searches are counted. What it tries before it fails in one place is not: the
    places where patterns are tried must be short."""

    def __init__(self, pattern: re.Pattern[str], work: Work) -> None:
        self._pattern = pattern
        self._work = work

    def search(self, text: str, *place: int) -> re.Match[str] | None:
        return self._whole(self._pattern.search(text, *place), text, place)

    def fullmatch(self, text: str, *place: int) -> re.Match[str] | None:
        return self._whole(self._pattern.fullmatch(text, *place), text, place)

    def match(self, text: str, *place: int) -> re.Match[str] | None:
        found = self._pattern.match(text, *place)
        self._work.spend(1 if found is None else found.end() - found.start())
        return found

    def finditer(self, text: str) -> Any:
        self._work.spend(len(text))
        return self._pattern.finditer(text)

    def sub(self, change: Any, text: str) -> str:
        self._work.spend(len(text))
        return self._pattern.sub(change, text)

    def _whole(
        self, found: re.Match[str] | None, text: str, place: tuple[int, ...]
    ) -> re.Match[str] | None:
        begin, end = (*place, len(text))[:2] if place else (0, len(text))
        self._work.spend((min(end, len(text)) if found is None else found.end()) - begin)
        return found


@contextmanager
def counting(forms: Iterable[Any]) -> Iterator[Work]:
    """Here, the patterns of the formats' modules and of these formats count."""
    work = Work()
    with ExitStack() as at_end:

        def put(owner: Any, name: str, value: Any) -> None:
            at_end.callback(object.__setattr__, owner, name, getattr(owner, name))
            object.__setattr__(owner, name, value)

        for name, module in list(sys.modules.items()):
            if name.startswith("setpoint.frontend.chat"):
                for key, value in list(vars(module).items()):
                    if isinstance(value, re.Pattern):
                        put(module, key, CountedPattern(value, work))
                    elif isinstance(value, Markers):
                        put(value, "_pattern", CountedPattern(value._pattern, work))
                    elif isinstance(value, dict) and isinstance(value.get('"'), re.Pattern):
                        put(module, key, {k: CountedPattern(v, work) for k, v in value.items()})
        for form in forms:
            for field in dataclasses.fields(form) if dataclasses.is_dataclass(form) else ():
                if isinstance(value := getattr(form, field.name), re.Pattern):
                    put(form, field.name, CountedPattern(value, work))
        make = Markers.__init__

        def make_counting(self: Any, *markers: str) -> None:
            make(self, *markers)
            self._pattern = CountedPattern(self._pattern, work)

        at_end.callback(setattr, Markers, "__init__", make)
        Markers.__init__ = make_counting  # type: ignore[method-assign]
        yield work
