"""Hands over the shares of all ranks: rank 0 tells the others what the scheduler wants, each rank
moves its own page rows to or from the same rank of the other engine, and the scheduler hears of it
when all ranks have ended. A failure of one rank is a failure of all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.handover import (
    Giver,
    HandoverState,
    PromptReceived,
    PromptSent,
    PromptWanted,
    Taker,
)
from setpoint.core.request import Ids, pack_ids, unpack_ids
from setpoint.engine.executor.rank_messages import (
    CancelFetch,
    FetchPrompt,
    GiverNews,
    OfferPrompt,
    SupplyPrompt,
    TakerNews,
    ToSide,
    WithdrawPrompt,
)
from setpoint.engine.executor.tensor_parallel import OtherRanks

LOST = "Another rank could not hand over its part."


@dataclass(slots=True)
class _Heard:
    """What the ranks have said about a sequence so far."""

    num_wanted: int = 0
    given: list[PromptSent] = field(default_factory=list)
    arrived: list[PromptReceived] = field(default_factory=list)
    handed: HandoverState | None = None
    """Rank 0's, which has the logprobs."""


class RankedGiver:
    """Implements ``core.handover.Giver`` on rank 0."""

    def __init__(
        self, others: OtherRanks, post: Callable[[PromptWanted | PromptSent], object]
    ) -> None:
        self._others, self._post = others, post
        self._own: Giver
        self._lock = threading.Lock()
        """Guards ``_open``."""
        self._open: dict[int, _Heard] = {}

    def lead(self, own: Giver) -> None:
        """Use this giver for rank 0's own share. It must post to ``note_own``."""
        self._own = own
        self._others.listen(GiverNews, lambda news: self.note_own(news.message))

    def offer(self, seq_id: int, room: int, digest: bytes) -> None:
        with self._lock:
            self._open[seq_id] = _Heard()
        self._others.send(OfferPrompt(seq_id, room, digest))
        self._own.offer(seq_id, room, digest)

    def supply(self, seq_id: int, rows: Ids, handed: HandoverState) -> None:
        bare = msgspec.structs.replace(handed, logprobs=None, token_facts={})
        self._others.send(SupplyPrompt(seq_id, pack_ids(rows), bare))
        self._own.supply(seq_id, rows, handed)

    def withdraw(self, seq_id: int, reason: str) -> None:
        self._others.send(WithdrawPrompt(seq_id, reason))
        self._own.withdraw(seq_id, reason)

    def note_own(self, message: PromptWanted | PromptSent) -> None:
        """Take what one rank's giver has said, in any thread."""
        with self._lock:
            heard, size = self._open[message.seq_id], self._others.group.size
            if isinstance(message, PromptWanted):
                heard.num_wanted += 1
                if heard.num_wanted == size:
                    self._post(message)
                return
            heard.given.append(message)
            failures = [each.failure for each in heard.given if each.failure]
            if len(heard.given) == size:
                del self._open[message.seq_id]
                self._post(_all_given(heard.given, failures))
                return
        if message.failure and len(failures) == 1:
            self.withdraw(message.seq_id, LOST)


class RankedTaker:
    """Implements ``core.handover.Taker`` on rank 0."""

    def __init__(self, others: OtherRanks, post: Callable[[PromptReceived], object]) -> None:
        self._others, self._post = others, post
        self._own: Taker
        self._lock = threading.Lock()
        """Guards ``_open``."""
        self._open: dict[int, _Heard] = {}

    def lead(self, own: Taker) -> None:
        """Use this taker for rank 0's own share. It must post to ``note_own``."""
        self._own = own
        self._others.listen(TakerNews, lambda news: self._note(news.message))

    def fetch(
        self, seq_id: int, bootstrap: Bootstrap, digest: bytes, skipped_rows: int, rows: Ids
    ) -> None:
        with self._lock:
            self._open[seq_id] = _Heard()
        self._others.send(FetchPrompt(seq_id, bootstrap, digest, skipped_rows, pack_ids(rows)))
        self._own.fetch(seq_id, bootstrap, digest, skipped_rows, rows)

    def cancel(self, seq_id: int) -> None:
        self._others.send(CancelFetch(seq_id))
        self._own.cancel(seq_id)

    def note_own(self, message: PromptReceived) -> None:
        """Take a message of rank 0's own taker, in any thread."""
        with self._lock:
            self._open[message.seq_id].handed = message.handed
        self._note(message)

    def _note(self, message: PromptReceived) -> None:
        with self._lock:
            heard = self._open[message.seq_id]
            heard.arrived.append(message)
            failures = [each.failure for each in heard.arrived if each.failure]
            if len(heard.arrived) == self._others.group.size:
                del self._open[message.seq_id]
                self._post(_all_arrived(heard, failures))
                return
        if message.failure and len(failures) == 1:
            self.cancel(message.seq_id)


def _all_given(given: list[PromptSent], failures: list[str]) -> PromptSent:
    return PromptSent(
        given[0].seq_id,
        failures[0] if failures else "",
        sum(each.num_bytes for each in given),
        max(each.seconds for each in given),
    )


def _all_arrived(heard: _Heard, failures: list[str]) -> PromptReceived:
    arrived = heard.arrived
    return PromptReceived(
        arrived[0].seq_id,
        None if failures else heard.handed,
        min(each.num_rows for each in arrived),
        failures[0] if failures else "",
        sum(each.num_bytes for each in arrived),
        max(each.seconds for each in arrived),
        max(each.waited_s for each in arrived),
    )


class RankSide:
    """What a rank but the first does when rank 0 says so."""

    def __init__(self, giver: Giver | None, taker: Taker | None) -> None:
        self._giver, self._taker = giver, taker

    def do(self, message: ToSide) -> None:
        match message:
            case OfferPrompt(seq_id, room, digest):
                assert self._giver is not None
                self._giver.offer(seq_id, room, digest)
            case SupplyPrompt(seq_id, rows, handed):
                assert self._giver is not None
                self._giver.supply(seq_id, unpack_ids(rows), handed)
            case WithdrawPrompt(seq_id, reason):
                assert self._giver is not None
                self._giver.withdraw(seq_id, reason)
            case FetchPrompt(seq_id, bootstrap, digest, skipped_rows, rows):
                assert self._taker is not None
                self._taker.fetch(seq_id, bootstrap, digest, skipped_rows, unpack_ids(rows))
            case CancelFetch(seq_id):
                assert self._taker is not None
                self._taker.cancel(seq_id)
