"""The tokens that a constraint leaves no choice about. Works on the masks of any automaton: a token
is forced where the mask has one bit. Text that must follow is no reason, because it can be written
in several tokens.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Protocol

import numpy as np

from setpoint.core.grammar import NotReady
from setpoint.core.request import Ids


class Automaton(Protocol):
    """What a grammar library knows of one sequence, as in ``core.grammar.Grammar``."""

    def accept(self, token: int) -> None: ...

    def fill_mask(self, words: Ids) -> None: ...

    @property
    def terminated(self) -> bool: ...

    def make_ready(self) -> None: ...


class Lookahead:
    """Implements core.grammar.Grammar. Its automaton has accepted the committed tokens and the
    forced ones after them, so the mask that ends a run of forced tokens is made once."""

    def __init__(self, automaton: Automaton, vocab_size: int) -> None:
        self._automaton = automaton
        self._ahead: deque[int] = deque()
        """Tokens that the automaton has accepted and that are not committed yet."""
        self._words = np.zeros(-(-vocab_size // 32), np.int32)
        self._is_current = False
        """Whether ``_words`` is the mask after all of ``_ahead``."""
        self._is_over = False
        """Whether nothing may come after ``_ahead``, which then is not empty."""
        self._error: Exception | None = None
        """What the automaton raised while it looked ahead; to be raised when it is due."""

    def accept(self, token: int) -> None:
        if self._ahead:
            assert token == self._ahead[0], "the mask allowed no other token"
            self._ahead.popleft()
            return
        if self._error is not None:
            raise self._error
        self._is_current = False
        self._automaton.accept(token)

    def allows(self, token: int) -> bool:
        words = np.zeros_like(self._words)
        self.fill_mask(words, 0)
        return bool(words.view(np.uint32)[token // 32] >> np.uint32(token % 32) & np.uint32(1))

    def forced(self, most: int) -> list[int]:
        if self._error is None:
            try:
                self._look(most)
            except NotReady:
                raise
            except Exception as error:
                self._error = error
        # After the last token of an output there is no mask to go on with, so it is sampled.
        return list(islice(self._ahead, min(len(self._ahead) - self._is_over, most)))

    def _look(self, most: int) -> None:
        while True:
            self._is_over = bool(self._ahead) and self._automaton.terminated
            if self._is_over or len(self._ahead) >= most:
                return
            if not self._is_current:
                self._words[:] = 0
                self._automaton.fill_mask(self._words)
                self._is_current = True
            token = only_token(self._words)
            if token is None:
                return
            self._automaton.accept(token)
            self._ahead.append(token)
            self._is_current = False

    def fill_mask(self, words: Ids, num_forced: int) -> None:
        if num_forced < len(self._ahead):
            token = self._ahead[num_forced]
            words.view(np.uint32)[token // 32] = np.uint32(1 << token % 32)
        elif self._is_current:
            words[:] = self._words
        elif self._error is not None:
            raise self._error
        else:
            self._automaton.fill_mask(words)

    @property
    def terminated(self) -> bool:
        return not self._ahead and self._automaton.terminated

    def make_ready(self) -> None:
        if self._error is not None:
            return
        try:
            self._automaton.make_ready()
        except Exception as error:
            if not self._ahead:
                raise
            self._error = error


def only_token(words: Ids) -> int | None:
    """The token of a mask that allows one only; None for any other mask."""
    if np.count_nonzero(words) != 1:
        return None
    index = int(words.argmax() if words.max() > 0 else words.argmin())
    word = int(words[index]) & 0xFFFFFFFF
    return 32 * index + word.bit_length() - 1 if word & (word - 1) == 0 else None
