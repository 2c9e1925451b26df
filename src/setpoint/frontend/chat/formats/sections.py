"""The common part of formats whose calls each begin with a marker, and may come together in a
section with markers of its own."""

from __future__ import annotations

from setpoint.frontend.chat.formats.machine import CallMachine
from setpoint.frontend.chat.formats.scanning import Markers, is_cut


def opening_markers(call_begin: str, section_begin: str, *, bare: bool) -> tuple[str, ...]:
    """The markers with which a call may begin. bare: see SectionMachine."""
    return (section_begin, call_begin) if section_begin and bare else (section_begin or call_begin,)


class SectionMachine(CallMachine):
    """A subclass reads one call: ``_header`` from after the marker that begins it, until it sets
    ``_between`` as the state. What is no call becomes text, the markers before it included."""

    def __init__(
        self,
        call_begin: str,
        *,
        section: tuple[str, str] = ("", ""),
        passed: tuple[str, ...] = (),
        bare: bool = True,
    ) -> None:
        """passed: what may come before and after a call in a section, with no meaning of its own.
        bare: whether a call may come outside of a section."""
        section_begin, section_end = section
        super().__init__(Markers(*opening_markers(call_begin, section_begin, bare=bare)))
        self._markers_outside = self._markers
        self._markers_inside = Markers(*filter(None, (call_begin, *section, *passed)))
        self._call_begin = call_begin
        self._passed = passed
        self._section_end = section_end
        self._in_section = False
        self._num_before = 0
        """The calls before the present section."""
        self._lead: list[str] = []
        """The markers and whitespace that have been passed before the present call."""

    def _header(self) -> bool:
        raise NotImplementedError

    def _opened(self, marker: str) -> None:
        self._lead = [marker]
        if marker == self._section_end:
            if self._num_calls == self._num_before:
                self._say(marker)  # the section's beginning has been text, too
            self._leave()
        elif marker == self._call_begin:
            self._state = self._header
        elif marker in self._passed:
            self._state = self._first_call
        else:
            self._in_section = True
            self._num_before = self._num_calls
            self._state = self._first_call

    def _leave(self) -> None:
        """The section has ended."""
        self._in_section = False
        self._read_text()

    def _read_text(self) -> None:
        """No call is here: what follows is text. In a section, calls may still come in it."""
        self._markers = self._markers_inside if self._in_section else self._markers_outside
        self._state = self._outside

    def _first_call(self) -> bool:
        """The section has begun: a call is due."""
        start = self._at
        follows = self._skip_space()
        self._lead.append(self._text[start : self._at])
        if not follows and not self._ended:
            return False
        start = self._at
        begins = self._meets(self._call_begin)
        passes = [self._meets(marker) for marker in self._passed if not begins]
        self._lead.append(self._text[start : self._at])
        if begins:
            self._state = self._header
        elif not any(passes):
            return False if None in (begins, *passes) else self._give_up()
        return True

    def _give_up(self) -> bool:
        """What has been read is no call; what follows may hold one."""
        self._say("".join(self._lead))
        self._read_text()
        return True

    def _between(self) -> bool:
        """Behind a call: another call or the section's end is due; both may be missing."""
        if not self._skip_space():
            return False
        if self._in_section and self._ended and is_cut(self._text, self._at, self._call_begin):
            self._at = len(self._text)  # the next call, of which nothing is there
            return False
        begins = self._meets(self._call_begin)
        if begins:
            self._lead = [self._call_begin]
            self._state = self._header
            return True
        passes = [self._closes(marker) for marker in self._passed]
        if any(passes):
            return True
        ends = self._closes(self._section_end) if self._section_end else False
        if None in (begins, *passes, ends):
            return False
        if ends:
            self._leave()
        else:
            self._read_text()
        return True
