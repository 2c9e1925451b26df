"""A constraint that begins in the middle of the output, after the reasoning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from setpoint.core.plan import forbid
from setpoint.core.request import Ids
from setpoint.grammar.lookahead import Automaton


class ConstrainedAfter:
    """Allows everything but the end of the output until ``ids`` have occurred consecutively, then
    what the grammar allows. An output that ended before would not satisfy the constraint. Where
    only the last of several ids is missing, only that one is allowed: gpt-oss may write more into
    the header of its answer, and the constraint would never begin."""

    def __init__(self, grammar: Automaton, ids: Sequence[int], ends: Sequence[int]) -> None:
        """ends: the token ids that end an output."""
        self._grammar = grammar
        self._ids = tuple(ids)
        self._ends = tuple(ends)
        self._last: tuple[int, ...] = ()
        """The last outputs, at most as many as there are ids."""
        self._has_begun = False

    def accept(self, token: int) -> None:
        if self._has_begun:
            self._grammar.accept(token)
            return
        self._last = (*self._last, token)[-len(self._ids) :]
        self._has_begun = self._last == self._ids

    def fill_mask(self, words: Ids) -> None:
        if self._has_begun:
            self._grammar.fill_mask(words)
            return
        before, last = self._ids[:-1], self._ids[-1]
        if before and self._last[-len(before) :] == before:
            words[:] = 0
            words.view(np.uint32)[last // 32] = 1 << last % 32
        else:
            words[:] = -1
            forbid(words, self._ends)

    @property
    def terminated(self) -> bool:
        return self._has_begun and self._grammar.terminated

    def make_ready(self) -> None:
        self._grammar.make_ready()
