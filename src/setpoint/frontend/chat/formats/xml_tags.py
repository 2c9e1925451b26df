"""Finds the tags of calls that are written as elements, in values that may contain such tags as
text: what makes a tag, and what the format allows behind one."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, Protocol

from setpoint.frontend.chat.formats.scanning import MAX_NAME_CHARS, Markers, is_cut

_NO_NAME = re.compile(r"[\s<>\"{}]")
_MAX_KEY_CHARS = MAX_NAME_CHARS + 32
MAX_GAP = 256
"""Most characters of whitespace between two tags that follow each other."""

Kind = Literal["key", "value_end", "end", "call", "section_end", "bad call", "lead"]


class Tag(NamedTuple):
    """A tag that is written as the format has it."""

    kind: Kind
    """What it begins or ends: a "key" is the beginning of an argument, a "call" of a call, a
    "bad call" of one whose name is none; a "lead" may stand before a call."""
    start: int
    stop: int
    """The indices of its first character, and behind its last."""
    name: str = ""
    """The name of the argument or of the function."""
    string: str = ""
    """"true" if the tag says that the value is a string, "false" if it says that it is JSON."""


class Syntax(Protocol):
    """The texts of a format's tags; ``XmlCalls`` says what each of them is."""

    @property
    def section(self) -> tuple[str, str]: ...

    @property
    def passed(self) -> tuple[str, ...]: ...

    @property
    def begin(self) -> str: ...

    @property
    def name_end(self) -> str: ...

    @property
    def end(self) -> str: ...

    @property
    def key_begin(self) -> str: ...

    @property
    def key(self) -> re.Pattern[str]: ...

    @property
    def key_end(self) -> str: ...

    @property
    def value_begin(self) -> str: ...

    @property
    def value_end(self) -> str: ...


_Read = Tag | Literal["text", "cut"]
"""A tag, or text that only begins like one, or text too short to tell."""


class XmlTags:
    """Finds the tags of one format."""

    def __init__(self, form: Syntax) -> None:
        self._form = form
        self._kinds: dict[str, Kind] = {
            form.key_begin: "key",
            form.value_end: "value_end",
            form.end: "end",
            form.begin: "call",
        }
        section_begin, section_end = form.section
        if section_end:
            self._kinds[section_end] = "section_end"
        self._markers = Markers(*self._kinds)
        self._with_leads = Markers(*self._kinds, *filter(None, (section_begin,)), *form.passed)
        self._between = [each for each in (section_begin, section_end, *form.passed) if each]
        leads = "|".join(map(re.escape, (*filter(None, (section_begin,)), *form.passed)))
        self._name_ends = [form.name_end] if form.name_end else [form.key_begin, form.end]
        self._cut_name_ends = Markers(*self._name_ends)
        self._due = (form.key_begin, form.end, form.begin, *self._between)
        """What may follow the name of a function."""
        self._lead = re.compile(rf"(?:\s|{leads})*\Z" if leads else r"\s*\Z")

    def find(
        self, text: str, at: int, *, ended: bool, malformed: bool = False, leads: bool = False
    ) -> tuple[Tag | None, int]:
        """The first tag from ``at`` on, and the index of its first character. If there is none, the
        index before which no later text can make one. ended: the answer has ended, so a header that
        is not complete is malformed. malformed: find the beginnings of malformed calls, too. leads:
        and what may stand before a call."""
        markers = self._with_leads if leads else self._markers
        while True:
            found = markers.find(text, at)
            if found is None:
                return None, self._with_leads.cut(text, at)
            kind = self._kinds.get(found.group())
            if kind is None:
                return Tag("lead", found.start(), found.end()), found.start()
            read = self._read(text, found.group(), found.start(), ended=ended and kind == "call")
            if read == "cut":
                return None, found.start()
            if read != "text":
                return read, found.start()
            if malformed and kind == "call":
                return Tag("bad call", found.start(), found.end()), found.start()
            at = found.end()

    def may_begin_in(self, text: str) -> bool:
        """Whether a tag, or what may stand before one, may begin in a text."""
        return text[-1:].isspace() or self._with_leads.may_begin_in(text)

    def follows(self, text: str, tag: Tag, *, ended: bool) -> bool | None:
        """Whether what the format allows behind a tag that ends something is what comes there; the
        end of the answer is allowed. None if the text is too short to tell."""
        at = _behind_space(text, tag.stop)
        if at == len(text):
            return True if ended else None
        if tag.kind == "end":
            allowed = [*self._between, self._form.begin]
            if any(text.startswith(each, at) for each in allowed):
                return True
        else:
            allowed = list(self._kinds)
            found = self._markers.find(text, at, at + self._markers.longest)
            if found is not None and found.start() == at:
                # A malformed argument is one all the same, which ``find`` passes over.
                read = self._read(text, found.group(), at, ended=ended)
                is_key = found.group() == self._form.key_begin
                return None if read == "cut" else is_key or read != "text"
        if any(is_cut(text, at, each) for each in allowed):
            return True if ended else None
        return False

    def lead(self, text: str) -> int:
        """The index of what may stand before a call at the end of a text: whitespace and the
        markers around calls."""
        window = max(len(text) - MAX_GAP, 0)
        found = self._lead.search(text, window)
        assert found is not None, "an empty end matches"
        return found.start()

    def _read(self, text: str, marker: str, start: int, *, ended: bool) -> _Read:
        kind = self._kinds[marker]
        at = start + len(marker)
        if kind == "key":
            return self._key(text, start, at, ended=ended)
        if kind == "call":
            return self._call(text, start, at, ended=ended)
        return Tag(kind, start, at)

    def _key(self, text: str, start: int, at: int, *, ended: bool) -> _Read:
        form = self._form
        other = self._markers.find(text, at, at + _MAX_KEY_CHARS)
        stop = text.find(form.key_end, at, at + _MAX_KEY_CHARS)
        if other is not None and not 0 <= stop < other.start():
            return "text"
        if stop < 0:
            return "cut" if len(text) - at < _MAX_KEY_CHARS and not ended else "text"
        found = form.key.fullmatch(text, at, stop)
        if found is None:
            return "text"
        named = found.groupdict()
        stop += len(form.key_end)
        if form.value_begin:
            stop = _behind_space(text, stop)
            if not text.startswith(form.value_begin, stop):
                may_come = is_cut(text, stop, form.value_begin) and not ended
                return "cut" if may_come else "text"
            stop += len(form.value_begin)
        return Tag("key", start, stop, named["key"], named.get("string") or "")

    def _call(self, text: str, start: int, at: int, *, ended: bool) -> _Read:
        """The beginning of a call, up to the end of the name."""
        ends = self._name_ends
        longest = max(map(len, ends))
        limit = at + MAX_NAME_CHARS + longest
        stops = [stop for each in ends if (stop := text.find(each, at, limit)) >= 0]
        if not stops:
            is_cut_off = len(text) < limit and not ended and self._may_be_name(text, at)
            return "cut" if is_cut_off else "text"
        name = text[at : min(stops)].strip()
        if not is_name(name):
            return "text"
        tag = Tag("call", start, min(stops) + len(self._form.name_end), name)
        begun = self.begins_call(text, _behind_space(text, tag.stop), ended=ended)
        return "cut" if begun is None else tag if begun else "text"

    def begins_call(self, text: str, at: int, *, ended: bool) -> bool | None:
        """Whether the text behind a name makes it a call's: a tag is there, or the answer ends.
        None if the text is too short to tell."""
        if any(text.startswith(each, at) for each in self._due):
            return True
        if at == len(text) or any(is_cut(text, at, each) for each in self._due):
            return True if ended else None
        return False

    def _may_be_name(self, text: str, at: int) -> bool:
        """Whether more text may make a name of the text from ``at`` on."""
        name = text[at : self._cut_name_ends.cut(text, at)].strip()
        return not _NO_NAME.search(name)


def _behind_space(text: str, at: int) -> int:
    most = min(len(text), at + MAX_GAP)
    while at < most and text[at].isspace():
        at += 1
    return at


def is_name(text: str) -> bool:
    """Whether a text can be the name of a function."""
    return 0 < len(text) <= MAX_NAME_CHARS and not _NO_NAME.search(text)
