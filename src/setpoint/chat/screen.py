"""The terminal of a chat: lines in, text out.

Model output is data: its control characters are shown, never sent. What is typed between prompts
waits for the next one. Without a terminal the output is plain: answers to stdout, nothing else.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import nullcontext
from types import TracebackType

from setpoint.chat.keyboard import Keyboard

_PROMPT = "> "
_CONTINUED = "… "
_FENCE = '"""'

_SHOWN = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Control characters -> their pictures (C1 has none). With them gone no escape sequence is left;
tab and newline are harmless."""


def printable(text: str) -> str:
    """``text`` with nothing in it that a terminal would obey."""
    return text.translate(_SHOWN)


class Screen:
    """A context manager: inside, the keyboard is the chat's."""

    def __init__(self) -> None:
        self._out, self._err = sys.stdout, sys.stderr
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(
                    errors="replace"
                )  # a wrong byte, or a character the locale lacks, is no reason to end
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        """Someone sits there: prompts and notes are shown."""
        self._has_colour = (
            self.is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        )
        self._column = 0
        """0 at the start of a line, as far as our own output goes."""
        self._keyboard = Keyboard(sys.stdin.fileno()) if self.is_terminal else None
        if self.is_terminal:
            import readline  # noqa: F401 - from here on input() has editing and history

    def __enter__(self) -> Screen:
        if self._keyboard is not None:
            self._keyboard.hold()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._keyboard is not None:
            self._keyboard.release()

    def read(self) -> tuple[str, bool]:
        """The next message, and whether it was fenced (then it is never a command). Raises EOFError
        at the end of the input.

        A line is a message; a backslash at its end continues it; a line that begins with three
        quotes opens a block that goes to the next three quotes at the end of a line, or to the end
        of the input.
        """
        line = self._line(_PROMPT)
        if line.lstrip().startswith(_FENCE):
            return self._block(line.lstrip().removeprefix(_FENCE)), True
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{self._line(_CONTINUED)}"
        return line, False

    def text(self, text: str) -> None:
        """A piece of an answer."""
        if text:
            self._write(printable(text))

    def end_line(self) -> None:
        if self._column:
            self._write("\n")

    def note(self, text: str) -> None:
        """A dim line about the chat itself; only for someone who sits there."""
        if self.is_terminal:
            self.end_line()
            self._write(
                f"\x1b[2m{printable(text)}\x1b[0m\n" if self._has_colour else f"{printable(text)}\n"
            )

    def error(self, text: str) -> None:
        self.end_line()
        print(f"error: {printable(text)}", file=self._err, flush=True)

    def _block(self, first: str) -> str:
        lines, line = [], first
        while not line.rstrip().endswith(_FENCE):
            lines.append(line)
            try:
                line = self._line(_CONTINUED)
            except EOFError:
                break
        else:
            lines.append(line.rstrip().removesuffix(_FENCE))
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        self.end_line()
        self._column = 1 if self.is_terminal else 0  # until the line is complete
        with nullcontext() if self._keyboard is None else self._keyboard.shown():
            line = input(prompt if self.is_terminal else "")
        self._column = 0
        return line

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
        self._column = 0 if text.endswith("\n") else 1
