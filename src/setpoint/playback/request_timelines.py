"""The requests of a recording: when each waited, ran and ended, and the table of them at any
time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec

from setpoint.core.messages import Submit, decode_to_loop
from setpoint.core.moments import Moment
from setpoint.core.records import Record, RequestAdmitted, RequestDone
from setpoint.frontend.telemetry.roster import MAX_ENDED, MAX_OPEN, Row, State, Table
from setpoint.recording.format import Kept, KeptArrival, KeptMessage, KeptTurn

MAX_LIVES = 200_000
"""Most requests that are kept: the latest ones."""


@dataclass(slots=True)
class RequestTimeline:
    """One request. Times are in seconds of the engine's clock, or None if the event did not happen
    during the recording."""

    seq_id: int
    rid: str
    num_prompt: int
    limit: int | None
    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None
    end: str | None = None
    num_cached: int = 0
    num_outputs: int = 0
    away: list[tuple[float, float]] = field(default_factory=list)
    """The times (begin, end) in which the request was back in the queue after a retraction."""

    def state(self, at: float) -> State:
        if self.ended is not None and self.ended <= at:
            return "ended"
        if self.admitted is None or at < self.admitted:
            return "waiting"
        if any(begin <= at < end for begin, end in self.away):
            return "retracted"
        return "prefill" if self.first_token is None or at < self.first_token else "running"

    def outputs(self, at: float) -> int:
        """The number of output tokens at that time, on the assumption that they came evenly."""
        if self.first_token is None or self.ended is None or at < self.first_token:
            return 0
        share = (at - self.first_token) / max(self.ended - self.first_token, 1e-9)
        return min(1 + int(share * (self.num_outputs - 1)), self.num_outputs)


class Lives:
    """All requests of a recording, collected from its rows and records in their order."""

    def __init__(self) -> None:
        self._open: dict[int, RequestTimeline] = {}
        self._all: list[RequestTimeline] = []
        """All requests, in the order of their arrival."""
        self._now = 0.0
        self.num_dropped = 0
        """Requests that were dropped because there were more than MAX_LIVES."""

    def finish(self) -> None:
        """Drop the oldest requests beyond MAX_LIVES. Call it after the last row."""
        self._drop(len(self._all) - MAX_LIVES)

    def take(self, read: Kept | Record) -> None:
        """Take a row of the recording; for a row that holds a record, take the record instead."""
        match read:
            case KeptTurn(at):
                self._now = at
            case KeptArrival():
                self._arrive(read.seq_id, read.rid, read.num_prompt, read.max_new_tokens)
            case KeptMessage(message):
                decoded = decode_to_loop(bytes(message))
                if isinstance(decoded, Submit):
                    request = decoded.request
                    limit = request.sampling.max_new_tokens
                    self._arrive(decoded.seq_id, request.rid, len(request.prompt()), limit)
            case RequestAdmitted():
                self._admit(read)
            case RequestDone():
                self._end(read)

    def _arrive(self, seq_id: int, rid: str, num_prompt: int, limit: int | None) -> None:
        life = RequestTimeline(seq_id, rid, num_prompt, limit, self._now)
        self._open[seq_id] = life
        self._all.append(life)
        if len(self._all) > 2 * MAX_LIVES:
            self._drop(MAX_LIVES)

    def _drop(self, number: int) -> None:
        """Drop the oldest requests."""
        if number > 0:
            self.num_dropped += number
            del self._all[:number]

    def _admit(self, admitted: RequestAdmitted) -> None:
        life = self._open.get(admitted.seq_id)
        if life is None:
            return
        if life.admitted is None:
            life.admitted, life.num_cached = self._now, admitted.num_cached
        else:
            life.away.append((self._now - admitted.waited_s, self._now))

    def _end(self, done: RequestDone) -> None:
        life = self._open.pop(done.seq_id, None)
        if life is None:
            return
        life.first_token, life.ended = done.first_token_at, done.ended_at
        life.num_cached, life.num_outputs = done.num_cached, done.num_outputs
        life.end = done.finish.how

    def __len__(self) -> int:
        return len(self._all)

    def table(self, at: float, epoch: float, moment: Moment | None) -> Table:
        """The table of requests at a time of the engine's clock. epoch: when that clock showed 0,
        in seconds since 1970. moment: that of this time, with the reasons for waiting."""
        known = self._all[: bisect_right(self._all, at, key=attrgetter("arrived"))]
        running, waiting, ended = [], [], []
        for life in known:
            state = life.state(at)
            if state == "ended":
                ended.append(life)
            elif state in ("running", "prefill"):
                running.append(_row(life, state, at))
            else:
                waiting.append(_row(life, state, at))
        for place, row in enumerate(waiting, 1):
            row.place = place
            row.why = _why(moment) if place == 1 else "blocked"
        ended.sort(key=lambda life: -(life.ended or 0.0))
        num_shown = min(len(running), max(MAX_OPEN // 2, MAX_OPEN - len(waiting)))
        past = [_ended_row(life, at, epoch) for life in ended[:MAX_ENDED]]
        return Table(
            paused=None,
            num_running=len(running),
            num_queued=len(waiting),
            num_preparing=0,
            rows=[*running[:num_shown], *waiting[: MAX_OPEN - num_shown], *past],
        )


def _why(moment: Moment | None) -> str | None:
    """The most frequent reason for refusals in the moment, other than waiting behind the first
    request."""
    refusals = {} if moment is None else moment.refusals
    counts = {why: count for why, count in refusals.items() if why != "blocked"}
    return max(counts, key=lambda why: counts[why], default=None)


def _row(life: RequestTimeline, state: State, at: float) -> Row:
    row = Row(
        rid=life.rid,
        state=state,
        prompt=life.num_prompt,
        cached=life.num_cached if state != "waiting" else 0,
        output=life.outputs(at),
        limit=life.limit,
        waited_s=round(min(at, at if life.admitted is None else life.admitted) - life.arrived, 3),
    )
    if life.admitted is not None and life.admitted <= at:
        row.ran_s = round(at - life.admitted, 3)
    if life.first_token is not None and life.first_token <= at:
        row.ttft_s = round(life.first_token - life.arrived, 4)
        if row.output > 1 and at > life.first_token:
            row.tps = round((row.output - 1) / (at - life.first_token), 1)
    return row


def _ended_row(life: RequestTimeline, at: float, epoch: float) -> Row:
    ended = at if life.ended is None else life.ended
    row = _row(life, "ended", ended)
    row.output, row.end = life.num_outputs, life.end
    return msgspec.structs.replace(row, ended_at=round(epoch + ended, 1))
