"""The bootstrap rooms of a prefill engine, each from its arrival to the end of its transfer. Knows
no sockets; for one thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from setpoint.core.handover import HandoverState, PromptSent, PromptWanted
from setpoint.core.request import Ids
from setpoint.handover.frames import Fetch

ENDED_ROOMS = 4096
"""Most bootstrap rooms whose end is remembered, with its reason, if they ended before they were
fetched."""
MAX_EARLY = 16384
"""Most fetches whose bootstrap room has not arrived yet."""
EARLY_S = 10.0
"""How long a bootstrap room may arrive after the fetch: both come from a router at the same
time."""
OTHER_PROMPT = "the prefill server has another prompt in this room"
IN_USE = "another transfer of this room is under way"
TOO_MANY = "too many transfers wait for their room"
NEVER_CAME = f"no request with this room has reached the prefill server in {EARLY_S:.0f} s"
HAS_BEEN_TAKEN = "the room has been taken before"
CANCELLED = "The decode server has cancelled the transfer."


class Receiver(Protocol):
    """A decode server, as a bootstrap room sees it."""

    def send(self, offer: Offer) -> None:
        """Begin to send an offer's pages, after those of offers before it."""

    def refuse(self, transfer: int, reason: str) -> None:
        """Tell it that a transfer will not take place, or goes no further."""


@dataclass(slots=True, eq=False)
class Offer:
    seq_id: int
    room: int
    digest: bytes
    """The digest of its prompt (``core.prefix_digest.prompt_digest``)."""
    receiver: Receiver | None = None
    """Who fetches it, under the number ``transfer``."""
    transfer: int = 0
    rows: Ids | None = None
    """Set, like ``handed``, when they may be sent."""
    handed: HandoverState | None = None
    num_bytes: int = 0
    """Bytes of pages that were sent."""
    began_at: float = 0.0
    is_over: bool = False
    """Nobody may read its pages any more."""


class Offers:
    def __init__(
        self, post: Callable[[PromptWanted | PromptSent], object], now: Callable[[], float]
    ) -> None:
        """post: takes what the engine's loop must know."""
        self._post = post
        self._now = now
        self._by_room: dict[int, Offer] = {}
        self._by_seq: dict[int, Offer] = {}
        self._early: dict[int, tuple[Receiver, Fetch, float]] = {}
        """Bootstrap room -> who has fetched it before it has arrived, and when; in order."""
        self._ended: OrderedDict[int, str] = OrderedDict()

    @property
    def num_open(self) -> int:
        return len(self._by_room)

    def holds(self, room: int) -> bool:
        return room in self._by_room

    def add(self, offer: Offer) -> None:
        assert offer.room not in self._by_room
        self._by_room[offer.room] = self._by_seq[offer.seq_id] = offer
        self._ended.pop(offer.room, None)
        early = self._early.pop(offer.room, None)
        if early is not None:
            self.fetch(early[0], early[1])

    def fetch(self, receiver: Receiver, fetch: Fetch) -> None:
        """A decode server wants a bootstrap room."""
        offer = self._by_room.get(fetch.room)
        if offer is not None and offer.digest != fetch.digest:
            receiver.refuse(fetch.transfer, OTHER_PROMPT)
        elif (offer is not None and offer.receiver is not None) or fetch.room in self._early:
            receiver.refuse(fetch.transfer, IN_USE)
        elif offer is not None:
            offer.receiver, offer.transfer = receiver, fetch.transfer
            self._post(PromptWanted(offer.seq_id, fetch.skipped_rows))
        elif (reason := self._ended.pop(fetch.room, None)) is not None:
            receiver.refuse(fetch.transfer, reason)
        elif len(self._early) >= MAX_EARLY:
            receiver.refuse(fetch.transfer, TOO_MANY)
        else:
            self._early[fetch.room] = (receiver, fetch, self._now())

    def supply(self, seq_id: int, rows: Ids, handed: HandoverState) -> None:
        """The pages of a wanted offer may be sent; of one that has ended meanwhile they are not."""
        offer = self._by_seq.get(seq_id)
        if offer is None:
            return
        assert offer.receiver is not None, "nobody has asked for these pages"
        offer.rows, offer.handed, offer.began_at = rows, handed, self._now()
        offer.receiver.send(offer)

    def withdraw(self, seq_id: int, reason: str) -> None:
        """End the offer of a sequence, if it has not ended."""
        offer = self._by_seq.get(seq_id)
        if offer is None:
            return
        if offer.receiver is not None:
            offer.receiver.refuse(offer.transfer, reason)
        self._end(offer, reason)

    def cancelled(self, receiver: Receiver, transfer: int) -> None:
        """The decode server does not want a transfer any more."""
        for offer in self._of(receiver, transfer):
            self._end(offer, CANCELLED)
        for room, (waiting, fetch, _) in list(self._early.items()):
            if waiting is receiver and fetch.transfer == transfer:
                del self._early[room]

    def taken(self, receiver: Receiver, transfer: int) -> bool:
        """The decode server says that it has all of a transfer. Returns False if that cannot be
        true, because the transfer still waits for its pages. If the transfer has ended already, the
        message and the refusal have crossed on the way, and nothing is to be done."""
        if any(
            receiver is each and fetch.transfer == transfer
            for each, fetch, _ in self._early.values()
        ):
            return False
        found = self._of(receiver, transfer)
        if any(each.rows is None for each in found):
            return False
        for offer in found:
            self._end(offer, "")
        return True

    def lost(self, receiver: Receiver, reason: str) -> None:
        """The decode server is gone."""
        for offer in [each for each in self._by_room.values() if each.receiver is receiver]:
            self._end(offer, reason)
        for room, (waiting, *_) in list(self._early.items()):
            if waiting is receiver:
                del self._early[room]

    def expire(self) -> None:
        """Give up fetches whose bootstrap room has not arrived in time; to be called now and
        then."""
        latest = self._now() - EARLY_S
        for room, (receiver, fetch, since) in list(self._early.items()):
            if since > latest:
                return
            del self._early[room]
            receiver.refuse(fetch.transfer, NEVER_CAME)

    def _of(self, receiver: Receiver, transfer: int) -> list[Offer]:
        return [
            offer
            for offer in self._by_room.values()
            if offer.receiver is receiver and offer.transfer == transfer
        ]

    def _end(self, offer: Offer, failure: str) -> None:
        del self._by_room[offer.room], self._by_seq[offer.seq_id]
        offer.is_over = True
        self._ended[offer.room] = failure or HAS_BEEN_TAKEN
        if len(self._ended) > ENDED_ROOMS:
            self._ended.popitem(last=False)
        seconds = self._now() - offer.began_at if offer.rows is not None else 0.0
        self._post(PromptSent(offer.seq_id, failure, offer.num_bytes, seconds))
