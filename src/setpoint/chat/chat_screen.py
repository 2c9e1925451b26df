"""The terminal of a chat: reads lines, writes text.

Model output is data: its control characters are shown as pictures and never sent to the terminal.
What is typed between prompts waits for the next one. Without a terminal the output is plain:
answers go to stdout, and nothing else does.
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

_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Control characters -> pictures of them (C1 characters have none). Without them no escape sequence
can form; tab and newline are harmless."""


def printable(text: str) -> str:
    """``text`` without anything that a terminal would execute."""
    return text.translate(_PICTURES)


class Screen:
    """A context manager; within it the chat owns the keyboard."""

    def __init__(self) -> None:
        self._out, self._err = sys.stdout, sys.stderr
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(
                    errors="replace"
                )  # a wrong byte, or a character that the locale lacks, must not end the chat
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        """A person is at the terminal: prompts and notes are shown."""
        self._has_colour = (
            self.is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        )
        self._column = 0
        """Column of the cursor according to our own output; 0 at the start of a line."""
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
        """The next message, and whether it was fenced (a fenced one is never a command). Raises
        EOFError at the end of the input.

        A line is a message; a backslash at its end continues it. A line that begins with three
        quotes opens a block that extends to the next three quotes at the end of a line, or to the
        end of the input.
        """
        line = self._line(_PROMPT)
        if line.lstrip().startswith(_FENCE):
            return self._block(line.lstrip().removeprefix(_FENCE)), True
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{self._line(_CONTINUED)}"
        return line, False

    def text(self, text: str) -> None:
        """Show a part of an answer."""
        if text:
            self._write(printable(text))

    def end_line(self) -> None:
        if self._column:
            self._write("\n")

    def note(self, text: str) -> None:
        """Show a dim line about the chat itself, if a person is at the terminal."""
        if self.is_terminal:
            self.end_line()
            self._write(
                f"\x1b[2m{printable(text)}\x1b[0m\n" if self._has_colour else f"{printable(text)}\n"
            )

    def tell(self, text: str, text_of_pipe: str) -> None:
        """Show what nobody may miss: ``text`` as a note, or ``text_of_pipe`` on stderr if no person
        is at the terminal."""
        if self.is_terminal:
            self.note(text)
        else:
            self.end_line()
            print(printable(text_of_pipe), file=self._err, flush=True)

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
        self._column = 1 if self.is_terminal else 0  # the prompt stands there until the line ends
        with nullcontext() if self._keyboard is None else self._keyboard.original_modes():
            line = input(prompt if self.is_terminal else "")
        self._column = 0
        return line

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
        self._column = 0 if text.endswith("\n") else 1
