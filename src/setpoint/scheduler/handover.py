"""Requests whose prompt one server computes and whose further tokens another one does
(docs/decisions/0072-prefill-and-decode-apart.md).

A prefill server: a request waits until its bootstrap room is fetched (a need), computes its prompt
and first token, gives up its slot and memory like any sequence that ends, and is *handing over*
until its pages have arrived. Its client hears of it then.

A decode server: a request waits until there is room for its prompt, and then until the prompt's
pages have arrived; both are one need. What has arrived is a cached prefix like any other, so the
sequence joins the queue with the token that the other server has sampled. If anything fails it
joins the queue without.

Knows no connections: ``core.handover.Giver`` and ``Taker`` have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from setpoint.core.errors import RequestError
from setpoint.core.handover import (
    Giver,
    HandoverCounts,
    HandoverState,
    PromptNews,
    PromptReceived,
    PromptSent,
    PromptWanted,
    Taker,
)
from setpoint.core.messages import Finish, PagesMoved, TokenEvent
from setpoint.core.prefix_digest import prompt_digest
from setpoint.core.preparation import Need
from setpoint.core.records import HandedOver, Observer
from setpoint.core.transfers import Direction, KVLocation
from setpoint.scheduler.emit import joined_logprobs
from setpoint.scheduler.handed_checks import FORBIDDEN, is_forbidden, what_is_wrong
from setpoint.scheduler.sequence import Sequence, Status
from setpoint.scheduler.state import State

NO_ROWS = np.zeros(0, np.int32)
ROOM_TAKEN = "bootstrap_room {} belongs to another request that has not ended yet."
ABORTED = "The request was aborted on the prefill server: {}"
TOO_LATE = "The decode server has not asked for the room in time."
TIMED_OUT = "the prefill server has not sent the prompt in time"
FAILED_STATUS = 500


class Handover(Protocol):
    """One of the two sides, for the scheduler."""

    def begin(self, seq: Sequence) -> None:
        """Let a new sequence wait for the other server, if it is computed by both. Raises
        RequestError if that is impossible."""

    def take(self, message: PromptNews) -> TokenEvent | None:
        """A message of the mover; returns an event to send, if there is one."""

    def is_kept(self, seq: Sequence, finish: Finish) -> bool:
        """A sequence has got its last token. Returns whether it goes on, without memory and slot,
        and ends later."""

    def advance(self) -> None:
        """Begin what waits for memory. Called before each step is planned, and after results."""

    def time_out(self, earliest: float) -> list[TokenEvent]:
        """End the waits that began before ``earliest``. Returns the last events of sequences that
        end with them."""

    def resume(self, seq: Sequence) -> TokenEvent | None:
        """The sequence has its grammar; returns an event to send, if there is one."""

    def brings_prompt(self, seq: Sequence) -> bool:
        """Whether the other server computes the prompt, so that no store is asked for it."""
        ...

    def counts(self) -> HandoverCounts:
        """How many requests wait for the other server."""
        ...


def is_shared(seq: Sequence) -> bool:
    """Whether two servers compute a request. Not one that an engine of this server had before: the
    other server has been told that the engine is gone."""
    bootstrap, request = seq.request.options.bootstrap, seq.request
    return (
        bootstrap is not None
        and not bootstrap.is_fake
        and not request.was_accepted
        and not request.prior_output_ids
    )


@dataclass(slots=True)
class _Giving:
    """A sequence that was offered to a decode server."""

    seq: Sequence
    skipped_rows: int = 0
    transfer_id: int | None = None
    """Its pages are held by this transfer."""
    finish: Finish | None = None
    """How it ends once they have arrived."""


class PrefillSide:
    """Implements ``Handover``."""

    def __init__(self, state: State, observer: Observer, giver: Giver) -> None:
        self._state = state
        self._observer = observer
        self._giver = giver
        self._open: dict[int, _Giving] = {}
        """The open transfer of each sequence, until its ``PromptSent``."""
        self._rooms: set[int] = set()
        """The bootstrap rooms of these sequences."""
        kept = {**state.preparing.cancel, Need.KV: lambda seq_id: None}  # the offer ends below
        state.preparing.cancel = kept
        state.end_offer = self._withdraw

    def begin(self, seq: Sequence) -> None:
        if not is_shared(seq):
            return
        room = _room_of(seq)
        if room in self._rooms:
            raise RequestError(ROOM_TAKEN.format(room))
        self._rooms.add(room)
        self._giver.offer(seq.seq_id, room, _digest_of(seq))
        self._open[seq.seq_id] = _Giving(seq)
        self._state.preparing.begin(seq, Need.KV)

    def take(self, message: PromptNews) -> TokenEvent | None:
        if isinstance(message, PromptWanted):
            self._wanted(message)
            return None
        assert isinstance(message, PromptSent)
        return self._given(message)

    def is_kept(self, seq: Sequence, finish: Finish) -> bool:
        giving = self._open.get(seq.seq_id)
        if giving is None or finish.type == "abort":
            return False
        state, page = self._state, self._state.cache.page_size
        transfer = state.transfers.hold(
            KVLocation.PEER,
            seq.prompt,
            seq.request.options.namespace,
            giving.skipped_rows * page,
            lambda *_: None,
        )
        if transfer is not None:
            giving.transfer_id = transfer.id
        giving.finish = finish
        rows = NO_ROWS if transfer is None else transfer.rows
        self._giver.supply(seq.seq_id, rows, _handed(seq))
        state.keep_handing(seq, finish)
        return True

    def advance(self) -> None:
        """Nothing waits for memory."""

    def resume(self, seq: Sequence) -> TokenEvent | None:
        return None

    def brings_prompt(self, seq: Sequence) -> bool:
        return False

    def time_out(self, earliest: float) -> list[TokenEvent]:
        state = self._state
        late = [
            each.seq
            for each in self._open.values()
            if each.seq.since < earliest
            and (Need.KV in each.seq.needs or each.seq.status is Status.HANDING)
        ]
        return [state.end(seq, _failed(TOO_LATE), outcome="timed_out") for seq in late]

    def counts(self) -> HandoverCounts:
        return HandoverCounts(
            "prefill",
            num_waiting=self._state.preparing.num_with(Need.KV),
            num_moving=len(self._state.handing),
        )

    def _wanted(self, message: PromptWanted) -> None:
        state, giving = self._state, self._open.get(message.seq_id)
        if giving is None or Need.KV not in giving.seq.needs:
            return  # it has ended meanwhile
        giving.skipped_rows = message.skipped_rows
        state.preparing.end(giving.seq, Need.KV, "loaded")
        state.enqueue_if_ready(giving.seq)

    def _given(self, message: PromptSent) -> TokenEvent | None:
        giving = self._open.pop(message.seq_id)
        state, seq = self._state, giving.seq
        self._rooms.remove(_room_of(seq))
        if giving.transfer_id is not None:
            moved = 0 if message.failure else len(state.transfers[giving.transfer_id].ids)
            state.transfers.end(
                PagesMoved(
                    giving.transfer_id,
                    moved,
                    num_bytes=message.num_bytes,
                    seconds=message.seconds,
                    why=message.failure,
                )
            )
        if seq.seq_id not in state.by_id:
            return None
        self._observer.on(
            HandedOver(
                seq.rid, seq.seq_id, message.failure, message.num_bytes, message.seconds, 0.0
            )
        )
        if seq.status is Status.HANDING and not message.failure:
            assert giving.finish is not None
            return state.end(seq, giving.finish)
        return state.end(seq, _failed(message.failure))

    def _withdraw(self, seq: Sequence) -> None:
        """Tell the decode server of a sequence that ends before its pages have arrived, however far
        it has come, so that it does not wait for them."""
        if seq.seq_id in self._open:
            assert seq.finish is not None
            why = seq.finish.message or seq.finish.type
            self._giver.withdraw(seq.seq_id, ABORTED.format(why))


class DecodeSide:
    """Implements ``Handover``."""

    def __init__(
        self,
        state: State,
        observer: Observer,
        taker: Taker,
        adopt: Callable[[Sequence, HandoverState], TokenEvent | None],
        look_up: Callable[[Sequence], None],
    ) -> None:
        """adopt: commits the tokens that were sampled by the prefill server, and ends the sequence
        if they do. look_up: lets a sequence wait for what stores have of its prompt, if there are
        any."""
        self._state = state
        self._observer = observer
        self._taker = taker
        self._adopt = adopt
        self._look_up = look_up
        self._waiting: dict[int, Sequence] = {}
        """Sequences for whose prompt there was no room yet."""
        self._arriving: dict[int, tuple[Sequence, int | None]] = {}
        """Sequences whose prompt is fetched, each with its transfer, until ``PromptReceived``."""
        self._room_s: dict[int, float] = {}
        """How long these waited for room."""
        self._handed: dict[int, HandoverState] = {}
        """What has been handed over for sequences that still wait for their grammar."""
        self._num_turns = 0
        state.preparing.cancel = {**state.preparing.cancel, Need.KV: self._cancel}

    def begin(self, seq: Sequence) -> None:
        if is_shared(seq):
            self._state.preparing.begin(seq, Need.KV)
            self._waiting[seq.seq_id] = seq

    def brings_prompt(self, seq: Sequence) -> bool:
        return seq.seq_id in self._waiting

    def is_kept(self, seq: Sequence, finish: Finish) -> bool:
        return False

    def advance(self) -> None:
        if not self._waiting:
            return
        self._num_turns += 1
        if self._num_turns % self._state.config.handover_interval:
            return
        for seq in list(self._waiting.values()):
            if not self._fits(seq):
                return
            del self._waiting[seq.seq_id]
            self._fetch(seq)

    def take(self, message: PromptNews) -> TokenEvent | None:
        assert isinstance(message, PromptReceived)
        state = self._state
        seq, transfer_id = self._arriving.pop(message.seq_id)
        room_s = self._room_s.pop(message.seq_id)
        if transfer_id is not None:
            state.transfers.end(
                PagesMoved(
                    transfer_id,
                    message.num_rows * state.cache.page_size,
                    num_bytes=message.num_bytes,
                    seconds=message.seconds,
                    why=message.failure,
                )
            )
        handed, failure = message.handed, message.failure
        if handed is not None:
            failure = what_is_wrong(seq, handed, state.config.vocab_size)
            handed = None if failure else handed
        if Need.KV not in seq.needs:
            return None  # it has ended meanwhile, or has waited too long
        self._observer.on(
            HandedOver(
                seq.rid,
                seq.seq_id,
                failure,
                message.num_bytes,
                message.seconds,
                message.waited_s,
                room_s,
            )
        )
        if handed is None:
            self._miss(seq)
            return None
        self._handed[seq.seq_id] = handed
        return self.resume(seq)

    def resume(self, seq: Sequence) -> TokenEvent | None:
        handed = self._handed.get(seq.seq_id)
        if handed is None or seq.needs != {Need.KV}:
            return None
        del self._handed[seq.seq_id]
        if is_forbidden(seq, handed):
            self._observer.on(HandedOver(seq.rid, seq.seq_id, FORBIDDEN, 0, 0.0, 0.0))
            self._miss(seq)
            return None
        event = self._adopt(seq, handed)
        if seq.finish is None:
            self._state.preparing.end(seq, Need.KV, "loaded")
            self._state.enqueue_if_ready(seq)
        return event

    def time_out(self, earliest: float) -> list[TokenEvent]:
        for seq in [each for each in self._state.preparing if Need.KV in each.needs]:
            if seq.since < earliest and seq.seq_id not in self._handed:
                self._cancel(seq.seq_id)
                self._observer.on(HandedOver(seq.rid, seq.seq_id, TIMED_OUT, 0, 0.0, 0.0))
                self._miss(seq)
        return []

    def counts(self) -> HandoverCounts:
        return HandoverCounts(
            "decode",
            num_waiting=len(self._waiting),
            num_moving=len(self._arriving),
            num_tokens=self._state.transfers.num_tokens(Direction.LOAD, KVLocation.PEER),
            num_retracted=sum(seq.num_retractions > 0 for seq in self._state.queue),
        )

    def _miss(self, seq: Sequence) -> None:
        """Let a sequence compute its prompt here, as far as no store has it. It is admitted then:
        until now it has waited for nothing."""
        seq.admitted_at = None
        self._look_up(seq)
        self._state.preparing.end(seq, Need.KV, "missed")
        self._state.enqueue_if_ready(seq)

    def _cancel(self, seq_id: int) -> None:
        self._handed.pop(seq_id, None)
        if self._waiting.pop(seq_id, None) is None and seq_id in self._arriving:
            self._taker.cancel(seq_id)

    def _fits(self, seq: Sequence) -> bool:
        """Whether the pool has room for a prompt beside a reserve for every sequence that runs or
        soon will. An engine that has nothing else to do takes any prompt."""
        state = self._state
        running = state.running.values()
        arriving = [each for each, _ in self._arriving.values()]
        others = [*running, *state.queue, *arriving]
        if not others:
            return True
        if len(others) >= state.settings.max_running_requests:
            return False
        reserve = state.config.num_reserved_decode_tokens
        kept = sum(min(reserve, max(each.remaining, 0)) for each in [*others, seq])
        kept += sum(each.num_known for each in state.queue)  # what has arrived is not locked
        needed = state.costs.decoding(len(seq.prompt)) + kept * state.cache.row.num_full
        return bool(needed <= state.available_tokens)

    def _fetch(self, seq: Sequence) -> None:
        """Take pages for a prompt, and ask for them. If the cache has all of it, or the pool has
        too few pages, only the first token is asked for."""
        state, options = self._state, seq.request.options
        assert options.bootstrap is not None
        transfer = state.transfers.reserve(
            KVLocation.PEER, seq.prompt, options.namespace, lambda *_: None
        )
        rows, start = NO_ROWS, len(seq.prompt)
        if transfer is not None:
            rows, start = transfer.rows, transfer.start
        self._room_s[seq.seq_id] = state.now - seq.since
        seq.admitted_at = state.now
        self._arriving[seq.seq_id] = seq, None if transfer is None else transfer.id
        self._taker.fetch(
            seq.seq_id,
            options.bootstrap,
            _digest_of(seq),
            start // state.cache.page_size,
            rows,
        )


def _digest_of(seq: Sequence) -> bytes:
    """Tells the prompt of a sequence from others."""
    request, num_tokens = seq.request, len(seq.prompt)
    return prompt_digest(request.prompt_ids, request.options.namespace, seq.digests(num_tokens))


def _room_of(seq: Sequence) -> int:
    bootstrap = seq.request.options.bootstrap
    assert bootstrap is not None
    return bootstrap.room


def _handed(seq: Sequence) -> HandoverState:
    return HandoverState(
        num_prompt=len(seq.prompt),
        seed=seq.request.seed,
        ids=seq.outputs.tolist(),
        num_cached=seq.num_cached,
        num_loaded=min(seq.num_loaded, seq.num_cached),
        num_from_host=min(seq.num_from_host, seq.num_cached),
        logprobs=joined_logprobs(seq),
        token_facts=seq.token_facts,
    )


def _failed(why: str) -> Finish:
    return Finish(
        "abort",
        message=f"The prompt could not be handed over: {why}",
        status_code=FAILED_STATUS,
        err_type="InternalServerError",
    )
