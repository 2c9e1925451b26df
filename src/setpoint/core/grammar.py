"""What the scheduler needs from a constrained-decoding engine; adapters implement it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from setpoint.core.messages import Finish
from setpoint.core.request import Ids, Request


class EndOfOutput(Exception):
    """Raised by a grammar: its sequence ends in this way, without the token of this step."""

    def __init__(self, finish: Finish) -> None:
        super().__init__()
        self.finish = finish


class Grammar(Protocol):
    """One sequence's constraint; only committed tokens advance it. What a method raises ends the
    sequence: EndOfOutput in its way, RequestError with its words, anything else with status 500."""

    def accept(self, token: int) -> None:
        """Advance by one committed token."""

    def forced(self, most: int) -> Sequence[int]:
        """The forced tokens that follow the committed ones, at most ``most``: the mask at the
        position of each allows no other, and after each another token may come."""
        ...

    def fill_mask(self, words: Ids, num_forced: int) -> None:
        """Write the bits of the tokens that are allowed after the committed ones and the first
        ``num_forced`` of the forced ones into ``words`` [ceil(vocab / 32)]."""

    @property
    def terminated(self) -> bool:
        """True when the grammar allows no further token, so that the sequence ends."""
        ...


class GrammarFactory(Protocol):
    def constrains(self, request: Request) -> bool:
        """True if the request asks for a grammar. The engine's loop calls this for every request,
        so it must be quick."""
        ...

    def is_cached(self, request: Request) -> bool:
        """True if the request's grammar has been compiled before and only has to be copied."""
        ...

    def __call__(self, request: Request) -> Grammar:
        """The automaton of a request that asks for a grammar. It may take long, and is called from
        other threads.

        Raises RequestError if the client's grammar is invalid.
        """
        ...
