"""What a prefill server hands over to a decode server besides pages, and what the mover of pages
and the scheduler's loop tell each other (docs/decisions/0072-prefill-and-decode-apart.md)."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.bounds import INT32_MAX, INT64_MAX
from setpoint.core.logprobs import LogprobBlock
from setpoint.core.request import Ids

Role = Literal["null", "prefill", "decode"]
"""What a server does of a request: all of it, its prompt and first token, or all that follows."""


class HandoverState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the decode side has to know besides the pages of the prompt."""

    num_prompt: Annotated[int, Meta(ge=1, le=INT32_MAX)]
    seed: Annotated[int, Meta(ge=0, le=INT64_MAX)]
    ids: Annotated[list[Annotated[int, Meta(ge=0, le=INT32_MAX)]], Meta(max_length=64)]
    """The tokens that the prefill side has sampled: one."""
    num_cached: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0
    """Tokens of the prompt that the prefill side did not compute. Of these, ``num_loaded`` came
    from cache tiers, and of those, ``num_from_host`` from memory of its machine."""
    num_loaded: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0
    num_from_host: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0
    logprobs: LogprobBlock | None = None
    """The logprobs of these tokens, if the client asked for them."""
    token_facts: dict[str, list[bytes]] = {}
    """See ``TokenEvent.token_facts``."""


class HandoverCounts(msgspec.Struct, frozen=True, array_like=True):
    """Requests of an engine that wait for the server that computes the other part of them."""

    role: Role
    num_waiting: int
    """The sequences that wait: on a prefill server, those whose bootstrap room nobody has fetched;
    on a decode server, those for whose prompt there is no room yet."""
    num_moving: int
    """The sequences whose pages move."""
    num_tokens: int = 0
    """Tokens for which pages were taken, and have not arrived."""
    num_retracted: int = 0
    """Requests in the queue that have run before."""


class PageStore(Protocol):
    """The pool's page rows (``core.pagerows``), for threads beside the loop. The scheduler holds
    the pages that they name until they have said that they are done."""

    width: int
    """Pages of a row."""
    row_bytes: int

    def read_into(self, rows: Ids, out: memoryview) -> None:
        """Copy these rows, which are flat, to ``out``: ``row_bytes`` for each of them."""

    def write_from(self, rows: Ids, data: memoryview) -> None:
        """Copy ``data`` to the pages of these rows; where a row has none (0), leave it out."""


# The next three have the tags that they have in recordings.
class PromptWanted(msgspec.Struct, frozen=True, tag="Wanted"):
    """Tells a prefill server's loop that the decode server has pages for this sequence's prompt."""

    seq_id: int
    skipped_rows: int
    """Page rows at the beginning of the prompt that it has already."""


class PromptSent(msgspec.Struct, frozen=True, tag="Given"):
    """Tells a prefill server's loop, once for each sequence that was offered, that its transfer has
    ended and nobody reads its pages any more."""

    seq_id: int
    failure: str = ""
    """Why the decode server does not have everything; "" if it has."""
    num_bytes: int = 0
    seconds: float = 0.0
    """The time from the first page to the decode server's word."""


class PromptReceived(msgspec.Struct, frozen=True, tag="Arrived"):
    """Tells a decode server's loop, once for each sequence that was fetched, that nobody writes to
    its pages any more."""

    seq_id: int
    handed: HandoverState | None = None
    """What came with the pages; None: the transfer has failed."""
    num_rows: int = 0
    """Page rows that have arrived, from the first one on."""
    failure: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    """The time from the first page to the last."""
    waited_s: float = 0.0
    """The time from the call of ``fetch`` to the first page."""


PromptNews = PromptWanted | PromptSent | PromptReceived


class Giver(Protocol):
    """The prefill side of an engine's transfers. The loop calls it; all methods return at once."""

    def offer(self, seq_id: int, room: int, digest: bytes) -> None:
        """Let the decode server fetch a bootstrap room, which no other sequence may have before its
        ``PromptSent``. ``PromptWanted`` follows if the decode server does, and ``PromptSent`` in
        any case."""

    def supply(self, seq_id: int, rows: Ids, handed: HandoverState) -> None:
        """Send the page rows of a sequence that is wanted."""

    def withdraw(self, seq_id: int, reason: str) -> None:
        """End a transfer, if it has not ended yet, and tell the decode server the reason."""


class Taker(Protocol):
    """The decode side of an engine's transfers."""

    def fetch(
        self, seq_id: int, bootstrap: Bootstrap, digest: bytes, skipped_rows: int, rows: Ids
    ) -> None:
        """Have these page rows filled with what the prefill server computes in the bootstrap room.
        ``PromptReceived`` follows."""

    def cancel(self, seq_id: int) -> None:
        """End a transfer, if it has not ended yet."""
