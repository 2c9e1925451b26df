"""Transfers: pages of keys and values that move between the pool and another place while steps go
on (docs/decisions/0071-transfers.md).

Contract between the scheduler and whoever moves pages:

* The scheduler holds every page of a transfer from its start until a ``PagesMoved`` message with
its id
  has come back, whatever becomes of the sequence that wanted it. So a late writer never meets a
  page that belongs to somebody else.
* Exactly one ``PagesMoved`` follows every ``load`` and every ``save``, also after ``cancel``. It is
an
  input of the loop's inbox, and is recorded.
* The pages of a save have been computed: every step that wrote them has given its result.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from setpoint.core.request import Ids


class KVLocation(enum.StrEnum):
    """Where keys and values can be besides the pool."""

    HOST = "host"  # memory of this machine
    STORAGE = "storage"  # files, an object store or a server of values
    PEER = "peer"  # another engine


class Direction(enum.StrEnum):
    LOAD = "load"  # into the pool
    SAVE = "save"  # out of it


@dataclass(slots=True, frozen=True)
class Transfer:
    """Page rows (``core.pagerows``) of one sequence that move."""

    id: int
    """A number that this engine has not used for another transfer."""
    direction: Direction
    place: KVLocation
    rows: Ids
    """The page rows, flat: for the positions from ``start`` on, as many as whole pages of ``ids``
    follow it. A load has no page (0) where the sequence will not look: before its windows."""
    start: int
    """Position of the first token of ``rows``, a multiple of the page size."""
    ids: Ids
    """Every token from position 0 to the end of ``rows``: keys and values depend on all of them."""
    namespace: str
    digests: bytes = b""
    """The digests of the whole blocks of ``ids`` (``core.prefix_digest``), in blocks of the stores'
    size; empty if the other place is no store."""


class Mover(Protocol):
    """Moves pages to and from stores, in threads of its own. The loop calls these methods; they
    return at once."""

    def look_up(self, seq_id: int, digests: bytes) -> None:
        """Find out how much of a prompt can be loaded, given the digests of its blocks
        (``Transfer.digests``). Exactly one ``PrefixFound`` with this ``seq_id`` follows."""

    def load(self, transfer: Transfer) -> None:
        """Fill the transfer's pages, from the first one on. ``PagesMoved.num_tokens`` says how far
        it came: of the pages behind that, the content is undefined."""

    def save(self, transfer: Transfer) -> None:
        """Copy the transfer's pages. The pages may change as soon as ``PagesMoved`` has been
        posted."""

    def cancel(self, transfer_id: int) -> None:
        """Stop a transfer soon; ``PagesMoved`` tells how far it came."""
