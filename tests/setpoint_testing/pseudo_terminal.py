"""A program at a real terminal, for tests: the test types, and reads what the program writes to the
screen."""

from __future__ import annotations

import codecs
import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_S = 60.0
CTRL_C, CTRL_D, CTRL_Z = "\x03", "\x04", "\x1a"

_ATTACH = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)  # now the controlling terminal: Ctrl-C works
for number in range(3):
    os.dup2(terminal, number)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class Terminal:
    def __init__(self, arguments: list[str], *, env: dict[str, str] | None = None) -> None:
        """``arguments`` of the Python interpreter."""
        self._master, slave = os.openpty()
        termios.tcsetwinsize(slave, (24, 100))
        command = [sys.executable, "-c", _ATTACH, os.ttyname(slave), *arguments]
        environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
        self.process = subprocess.Popen(command, start_new_session=True, env=environment)
        self._slave = slave
        """Kept open: if nobody holds a terminal, reading gives an error instead of what was last
        written to it."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.raw = ""
        """Everything that was written, escape sequences included."""
        self._seen = 0
        """The place in ``screen`` from which ``expect`` searches."""

    @property
    def screen(self) -> str:
        """Everything that was written, as text."""
        return _ESCAPES.sub("", self.raw)

    def modes(self) -> list[Any]:
        """The modes of the terminal, as ``termios`` returns them."""
        return termios.tcgetattr(self._slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str, *, timeout_s: float = PATIENCE_S) -> str:
        """Wait for ``text`` in the output since the last match; returns what came before it."""
        deadline = time.monotonic() + timeout_s
        while (found := self.screen.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.screen[self._seen :]!r}"
            self.read(0.1)
        before = self.screen[self._seen : found]
        self._seen = found + len(text)
        return before

    def end(self, *, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end of the program; returns its exit code."""
        code = self.process.wait(timeout_s)
        while self.read(0.1):
            pass
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def read(self, timeout_s: float) -> bool:
        """Read what has been written, and wait for it if nothing has. Returns False if nothing came
        within ``timeout_s``."""
        if not select.select([self._master], [], [], timeout_s)[0]:
            return False
        self.raw += self._decoder.decode(os.read(self._master, 1 << 16))
        return True


@contextmanager
def terminal(arguments: list[str], *, env: dict[str, str] | None = None) -> Iterator[Terminal]:
    opened = Terminal(arguments, env=env)
    try:
        yield opened
    finally:
        opened.close()
