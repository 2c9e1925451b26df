"""Keeps the slow work of a library in this process out of the engine's loop. Each call of the
library must have a limit of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from setpoint.core.grammar import NotReady
from setpoint.core.request import Ids
from setpoint.grammar.patience import QUICK_S, Patience


class Matcher(Protocol):
    """What a library knows of one sequence. Its methods work until they have the answer."""

    def accept(self, token: int) -> None: ...

    def fill_mask(self, words: Ids) -> None: ...

    @property
    def terminated(self) -> bool: ...


class Paced:
    """Implements Automaton. The loop itself does the work of a token if that of the token before
    was quick. Other work, and the first, waits for ``make_ready``."""

    def __init__(
        self,
        matcher: Matcher,
        patience: Patience,
        *,
        vocab_size: int,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """clock: seconds of computing of the thread that looks."""
        self._matcher = matcher
        self._patience = patience
        self._clock = clock
        self._todo: list[int] = []
        """Tokens that the matcher has not accepted."""
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)
        self._has_mask = False
        """Whether ``_mask`` has the tokens that may come after the last one."""
        self._spent_s, self._spent_before_s = math.inf, math.inf
        """The work of the last token and of the one before it."""

    def accept(self, token: int) -> None:
        self._todo.append(token)
        self._has_mask = False
        self._spent_s, self._spent_before_s = 0.0, self._spent_s
        if self._may_work:
            with self._timed_in_loop():
                self._take_in()

    def fill_mask(self, words: Ids) -> None:
        if not self._has_mask:
            self._demand()
            with self._timed_in_loop():
                self._make_mask()
        words[:] = self._mask

    @property
    def terminated(self) -> bool:
        if self._todo:
            self._demand()
            with self._timed_in_loop():
                self._take_in()
        return self._matcher.terminated

    def make_ready(self) -> None:
        before, began = self._spent_s, self._clock()
        self._take_in()
        if not (self._has_mask or self._matcher.terminated):
            self._make_mask()
        spent = self._clock() - began
        self._spent_s = spent if math.isinf(before) else before + spent

    @property
    def _may_work(self) -> bool:
        spent = max(self._spent_s, self._spent_before_s)
        return spent <= QUICK_S and self._patience.left_s > 0

    def _demand(self) -> None:
        if not self._may_work:
            raise NotReady

    @contextmanager
    def _timed_in_loop(self) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - began
            self._spent_s += spent
            self._patience.spend(spent)

    def _take_in(self) -> None:
        while self._todo:
            self._matcher.accept(self._todo.pop(0))

    def _make_mask(self) -> None:
        self._take_in()
        self._mask[:] = 0
        self._matcher.fill_mask(self._mask)
        self._has_mask = True
