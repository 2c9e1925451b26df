"""A nursery whose library allows any byte, hangs where the constraint says so, and imports nothing
that takes long.

The text of a constraint: "hang" never compiles, "wait N" computes for ever behind N tokens, "wait N
PATH" does so when there is such a file, "late PATH" compiles when there is one, "nothing" allows no token, "memory" takes all memory, and
anything else is quick.
"""

from __future__ import annotations

import os
import socket
import sys
import time

from setpoint.core.constraint import Constraint
from setpoint.core.errors import RequestError
from setpoint.core.request import Ids
from setpoint.grammar.process_server import serve_forks

VOCAB_SIZE = 97


def hang() -> None:
    while True:
        pass


class Matcher:
    def __init__(self, hangs_behind: int | None, path: str, *, allows: int) -> None:
        self._hangs_behind = hangs_behind
        self._path = path
        self._allows = allows
        self._num_tokens = 0
        self.terminated = False

    def accept(self, token: int) -> None:
        if token == 13:
            raise RequestError("The grammar does not allow token 13.")
        self._num_tokens += 1

    def fill_mask(self, words: Ids) -> None:
        if self._num_tokens == self._hangs_behind:
            while self._path and not os.path.exists(self._path):
                time.sleep(0.005)
            hang()
        words[:] = self._allows


class Compiled:
    def __init__(self, text: str) -> None:
        self.num_bytes = 1 << 20
        self._text = text

    def start(self) -> Matcher:
        word, number, path, *_ = [*self._text.split(" "), "", ""]
        return Matcher(
            int(number) if word == "wait" else None, path, allows=0 if word == "nothing" else -1
        )


def compiler(constraint: Constraint) -> Compiled:
    if constraint.text == "hang":
        hang()
    if constraint.text.startswith("late "):
        while not os.path.exists(constraint.text.removeprefix("late ")):
            time.sleep(0.005)
    if constraint.text == "memory":
        bytes(1 << 40)
    if constraint.text == "wrong":
        raise RequestError("it is wrong")
    return Compiled(constraint.text)


if __name__ == "__main__":
    serve_forks(socket.socket(fileno=sys.stdin.fileno()), compiler, vocab_size=VOCAB_SIZE)
