"""What a request may need before it can join the queue, for the first time or again, and the
interface for preparing one of these needs, its grammar. The work is done outside the engine's
loop."""

from __future__ import annotations

import enum
from typing import Protocol

from setpoint.core.grammar import Grammar
from setpoint.core.request import Ids, Request


class Need(enum.StrEnum):
    """What a request waits for. A request has a set of needs, which are met independently."""

    GRAMMAR = "grammar"
    CACHE = "cache"  # that a part of its prompt is loaded into the pool
    KV = "kv"  # keys and values that another engine sends


class Preparer(Protocol):
    """Prepares the grammars of requests, and puts a ``Prepared`` message in the loop's inbox when
    one is ready. A request is in preparation at most once at a time. The loop calls these methods;
    they return at once."""

    def needs(self, seq_id: int, request: Request) -> bool:
        """True if this request has to be prepared before it joins the queue."""
        ...

    def start(self, seq_id: int, request: Request, outputs: Ids) -> None:
        """Begin to prepare a request. Exactly one ``Prepared`` message with this ``seq_id``
        follows, unless the request is cancelled first.

        outputs: the tokens that the grammar must accept before it is used.
        """

    def take(self, seq_id: int) -> Grammar | None:
        """The prepared grammar; None if the preparation made none. Call it once, after a
        ``Prepared`` message without an error."""
        ...

    def make_ready(self, seq_id: int, grammar: Grammar) -> None:
        """Begin ``grammar.make_ready``. The contract of ``start`` applies, and ``take`` returns
        this grammar."""

    def cancel(self, seq_id: int) -> None:
        """Stop preparing a request that nobody waits for any more. A ``Prepared`` message that is
        already on its way may still arrive."""
