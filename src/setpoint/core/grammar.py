"""The interface that the scheduler needs from a constrained-decoding engine; adapters implement
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from setpoint.core.messages import Finish
from setpoint.core.request import Ids, Request


class EndOfOutput(Exception):
    """Raised by a grammar: its sequence ends with ``finish``, without the token of this step."""

    def __init__(self, finish: Finish) -> None:
        super().__init__()
        self.finish = finish


class NotReady(Exception):
    """Raised by a grammar: the answer takes longer than the loop waits. After ``make_ready`` it
    does not."""


class Grammar(Protocol):
    """One sequence's constraint; only committed tokens advance it. An exception from a method ends
    the sequence: EndOfOutput with its ``finish``, RequestError with its message, anything else with
    status 500. NotReady ends nothing: the sequence leaves the batch until ``make_ready`` has
    returned."""

    def accept(self, token: int) -> None:
        """Advance by one committed token. Never raises NotReady."""

    def allows(self, token: int) -> bool:
        """Whether the token may come after the committed ones."""
        ...

    def forced(self, most: int) -> Sequence[int]:
        """The forced tokens that follow the committed ones, at most ``most``. At the position of
        each the mask allows no other token, and after each another token may come."""
        ...

    def fill_mask(self, words: Ids, num_forced: int) -> None:
        """Write into ``words`` [ceil(vocab / 32)] the bits of the tokens that are allowed after the
        committed ones and the first ``num_forced`` of the forced ones."""

    @property
    def terminated(self) -> bool:
        """True when the grammar allows no further token, so that the sequence ends."""
        ...

    def make_ready(self) -> None:
        """Compute what ``terminated`` and ``fill_mask`` need after the committed tokens. It may
        take long; another thread calls it while the loop does not use the grammar."""


class GrammarFactory(Protocol):
    def prepare(self) -> None:
        """Make the data that all grammars share. Called once, in a thread, when the engine is idle:
        it may hold the interpreter's lock for a second and would delay every stream."""

    def constrains(self, request: Request) -> bool:
        """True if the request asks for a grammar. The engine's loop calls this for every request,
        so it must be quick."""
        ...

    def is_cached(self, request: Request) -> bool:
        """True if the request's grammar has been compiled before and only has to be copied."""
        ...

    def __call__(self, request: Request, is_wanted: Callable[[], bool] = lambda: True) -> Grammar:
        """The automaton of a request that asks for a grammar. It may take long, and is called from
        other threads.

        is_wanted: whether somebody still waits for it; work that can be stopped is stopped when it
        returns False. Raises RequestError if the client's grammar is invalid.
        """
        ...
