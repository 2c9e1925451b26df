"""The automaton of one sequence, which a process runs."""

from __future__ import annotations

import time

import numpy as np

from setpoint.core.errors import RequestError
from setpoint.core.grammar import NotReady
from setpoint.core.request import Ids
from setpoint.grammar.masks import (
    NOTHING_ALLOWED,
    TOO_MUCH_WORK,
    MaskBudget,
    forbid_while_others,
    stuck,
)
from setpoint.grammar.patience import QUICK_S, Patience
from setpoint.grammar.process_messages import MatcherState
from setpoint.grammar.processes import TOKEN_S, GrammarProcess, ProcessLostError


class RemoteAutomaton:
    """Implements Automaton. The loop waits a moment for the answer about a token if the one before
    was quick."""

    def __init__(
        self, process: GrammarProcess, patience: Patience, *, forbidden: tuple[int, ...]
    ) -> None:
        """forbidden: tokens that are not allowed where any other is."""
        self._process = process
        self._patience = patience
        self._forbidden = forbidden
        self._budget = MaskBudget()
        self._number = process.join(self)
        self._state: MatcherState | None = None
        self._error = ""
        self._spent_s = TOKEN_S
        """Computing time of the last answer; of the first, nothing is known."""
        self._unpaid_s = 0.0
        """Computing time that the budget does not know of yet."""
        self.num_pending = 0
        self._advance([])

    def accept(self, token: int) -> None:
        if self._error:
            raise RequestError(self._error)
        self._budget.earn()
        self._advance([token])

    def fill_mask(self, words: Ids) -> None:
        state = self._answer()
        words[:] = np.frombuffer(state.mask, np.int32)
        if self._forbidden:
            forbid_while_others(words, self._forbidden)
        if not words.any():
            raise stuck(NOTHING_ALLOWED)

    @property
    def terminated(self) -> bool:
        return self._answer().terminated

    def make_ready(self) -> None:
        self._wait(float("inf"))
        self._settle()

    def take(self, state: MatcherState) -> None:
        """Called by the thread that has read an answer."""
        self._state = state
        self._error = self._error or state.error
        self._spent_s = state.seconds
        self._unpaid_s += state.seconds
        self.num_pending -= 1  # last: then all of the above may be read

    def _advance(self, tokens: list[int]) -> None:
        self.num_pending += 1
        self._process.advance(self._number, tokens)

    def _answer(self) -> MatcherState:
        if self.num_pending:
            is_slow = self._spent_s > QUICK_S
            began = time.monotonic()
            is_there = self._wait(0.0 if is_slow else QUICK_S + max(0.0, self._patience.left_s))
            self._patience.spend(time.monotonic() - began)
            if not is_there:
                raise NotReady
        return self._settle()

    def _wait(self, timeout_s: float) -> bool:
        try:
            return self._process.wait(self, timeout_s)
        except ProcessLostError as error:
            raise (stuck(TOO_MUCH_WORK) if error.ending.is_its_own else error.in_words()) from None

    def _settle(self) -> MatcherState:
        """The answer that is there, if it was no error and the sequence may compute as much."""
        spent, self._unpaid_s = self._unpaid_s, 0.0
        self._budget.spend(spent)
        if self._error:
            raise RequestError(self._error)
        assert self._state is not None
        return self._state
