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
    def __call__(self, request: Request) -> Grammar | None:
        """The request's automaton, or None if its output is free."""
        ...
