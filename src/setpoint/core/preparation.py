"""What a request may have to wait for before it joins the queue is made outside the loop: today its
grammar."""

from __future__ import annotations

from typing import Protocol

from setpoint.core.grammar import Grammar
from setpoint.core.request import Ids, Request


class Preparer(Protocol):
    """Prepares requests, each at most once at a time, and says so with a ``Prepared`` message in
    the loop's inbox. Its methods are called by the loop, and return at once."""

    def needs(self, seq_id: int, request: Request) -> bool:
        """Whether this request has to be prepared at all."""
        ...

    def start(self, seq_id: int, request: Request, outputs: Ids) -> None:
        """Begin. Exactly one ``Prepared`` with this ``seq_id`` follows, at any time, unless it is
        cancelled before.

        outputs: the tokens that the grammar has to accept before it is used.
        """

    def take(self, seq_id: int) -> Grammar | None:
        """What was prepared, once, after a ``Prepared`` without an error; None = nothing to
        keep."""
        ...

    def cancel(self, seq_id: int) -> None:
        """Nobody waits for it any more. A ``Prepared`` may still come, if it is on its way."""
