"""Moves the shares of all ranks of a transfer: rank 0 tells the others, and a transfer has ended
when it has on every rank. Its outcome is the least of all."""

from __future__ import annotations

import threading
from collections.abc import Callable

from setpoint.core.messages import PagesMoved, PrefixFound
from setpoint.core.request import pack_ids
from setpoint.core.transfers import Mover, Transfer
from setpoint.engine.executor.tensor_parallel import CancelMove, Move, MoveEnded, OtherRanks


class RankedMover:
    """Implements ``core.transfers.Mover`` on rank 0."""

    def __init__(
        self, others: OtherRanks, post: Callable[[PrefixFound | PagesMoved], object]
    ) -> None:
        self._others, self._post = others, post
        self._own: Mover
        self._lock = threading.Lock()
        """Guards ``_ended``."""
        self._ended: dict[int, list[PagesMoved]] = {}
        """Transfer -> what has come back so far."""

    def lead(self, own: Mover) -> None:
        """Use this mover for rank 0's own share. It must post to ``post_own``."""
        self._own = own
        self._others.listen(MoveEnded, lambda ended: self._note(ended.moved))

    def look_up(self, seq_id: int, digests: bytes) -> None:
        """Only rank 0 looks: what another rank lacks shortens the load."""
        self._own.look_up(seq_id, digests)

    def load(self, transfer: Transfer) -> None:
        self._tell(transfer)
        self._own.load(transfer)

    def save(self, transfer: Transfer) -> None:
        self._tell(transfer)
        self._own.save(transfer)

    def cancel(self, transfer_id: int) -> None:
        self._others.send(CancelMove(transfer_id))
        self._own.cancel(transfer_id)

    def post_own(self, message: PrefixFound | PagesMoved) -> None:
        """Take a message of rank 0's own mover, in any thread."""
        if isinstance(message, PagesMoved):
            self._note(message)
        else:
            self._post(message)

    def _tell(self, transfer: Transfer) -> None:
        with self._lock:
            self._ended[transfer.id] = []
        self._others.send(
            Move(
                transfer.id,
                transfer.direction,
                transfer.place,
                pack_ids(transfer.rows),
                transfer.start,
                pack_ids(transfer.ids),
                transfer.namespace,
                transfer.digests,
            )
        )

    def _note(self, message: PagesMoved) -> None:
        with self._lock:
            found = self._ended[message.id]
            found.append(message)
            if len(found) < self._others.group.size:
                return
            del self._ended[message.id]
        least = min(found, key=lambda each: each.num_tokens)
        self._post(
            PagesMoved(
                message.id,
                least.num_tokens,
                sum(each.num_bytes for each in found),
                max(each.seconds for each in found),
                least.why,
                min(each.from_host for each in found),
            )
        )
