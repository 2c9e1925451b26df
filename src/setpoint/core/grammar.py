"""What the scheduler needs of a constrained-decoding engine; implementations live behind
adapters."""

from __future__ import annotations

from typing import Protocol

from setpoint.core.request import Ids, Request


class Grammar(Protocol):
    """One sequence's automaton, advanced by committed tokens only."""

    def accept(self, token: int) -> None:
        """Advance by a token that was committed."""

    def fill_mask(self, words: Ids) -> None:
        """Write the allowed-token bits into ``words`` [ceil(vocab / 32)]."""

    @property
    def terminated(self) -> bool:
        """True when the grammar admits nothing more: the sequence ends."""
        ...


class GrammarFactory(Protocol):
    def constrains(self, request: Request) -> bool:
        """Whether the request asks for a grammar. Asked for every request by the engine's loop: it
        must be quick."""
        ...

    def __call__(self, request: Request) -> Grammar:
        """The automaton of a request that asks for one. May take long, and is called from threads.

        Raises RequestError for a grammar that the client got wrong.
        """
        ...
