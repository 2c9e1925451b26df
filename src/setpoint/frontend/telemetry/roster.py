"""The requests that are open, and the last that ended, as rows of a table for people who watch. A
row has counts, times and names, and never any text of a prompt or an answer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal

import msgspec

from setpoint.core.control import RequestList
from setpoint.frontend.telemetry.measured_sequence import MeasuredSequence

MAX_OPEN = 70
MAX_ENDED = 30

State = Literal["preparing", "waiting", "retracted", "prefill", "running", "ended"]


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence. Times are in seconds; None for what is not known or has not happened."""

    rid: str
    state: State
    route: str = ""
    """The path that its client called; "" for the work of a batch."""
    dp_rank: int | None = None
    """The rank of its engine, if the server has several."""
    why: str | None = None
    """Why it waits: "grammar", "paused", "engine" (none is ready), or a
    ``core.records.AdmissionRefusal`` (for those behind the head of the queue, "blocked")."""
    place: int | None = None
    """Its place in the queue, from 1."""
    prompt: int = 0
    """Tokens, like the next three."""
    cached: int = 0
    output: int = 0
    limit: int | None = None
    """The most output that it may have, if the client set one."""
    waited_s: float | None = None
    """Seconds from its submission to its first admission, or until now."""
    ran_s: float | None = None
    """Seconds from its first admission to its end, or until now."""
    ttft_s: float | None = None
    tps: float | None = None
    """Output tokens per second since the first."""
    ended_at: float | None = None
    """When it ended, in seconds since 1970."""
    end: str | None = None
    """How it ended: "stop", "length", "abort"; "left" if its client went away."""


class Table(msgspec.Struct, kw_only=True):
    """rows: at most MAX_OPEN open ones, running ones first, and then the MAX_ENDED that ended last,
    newest first."""

    paused: str | None
    """The mode of the pause in force."""
    num_running: int
    num_queued: int
    num_preparing: int
    rows: list[Row]


class Roster:
    """Kept by ``RequestEvents``. A request costs two dictionary operations; rows are made for those
    who ask."""

    def __init__(self) -> None:
        self._open: dict[int, MeasuredSequence] = {}
        """Open sequences by the number of their submission."""
        self._ended: deque[Row] = deque(maxlen=MAX_ENDED)

    def started(self, outputs: Sequence[MeasuredSequence]) -> None:
        for output in outputs:
            if output.seq_id is not None:
                self._open[output.seq_id] = output

    def ended(self, output: MeasuredSequence) -> None:
        """Does nothing for a sequence that was never submitted."""
        if output.seq_id is None or self._open.pop(output.seq_id, None) is None:
            return
        now = output.finished_at or time.perf_counter()
        row = _row(output, "ended", now)
        row.ended_at = round(time.time(), 1)
        row.end = "left" if output.finish is None else output.finish.type
        self._ended.append(row)

    def table(
        self, engines: Sequence[tuple[int, RequestList]], homeless: Iterable[int] = ()
    ) -> Table:
        """engines: where each engine, by its rank, says that its requests are. homeless: the
        numbers of the requests that wait for an engine."""
        now = time.perf_counter()
        running = [
            (rank, engine, output)
            for rank, engine in engines
            for output in self._known(engine.running)
        ]
        waiting = [_lost_row(output, now) for output in self._known(homeless)]
        for rank, engine in engines:
            places = {seq_id: place for place, seq_id in enumerate(engine.queue, 1)}
            for output in islice(self._known([*engine.preparing, *places]), MAX_OPEN):
                waiting.append(_waiting_row(output, places.get(output.seq_id or 0), engine, now))
                waiting[-1].dp_rank = rank
        num_running = min(len(running), max(MAX_OPEN // 2, MAX_OPEN - len(waiting)))
        rows = []
        for rank, engine, output in running[:num_running]:
            state: State = "prefill" if output.seq_id == engine.prefilling else "running"
            rows.append(_row(output, state, now, engine.outputs.get(output.seq_id or 0, 0)))
            rows[-1].dp_rank = rank
        rows += waiting[: MAX_OPEN - num_running]
        if len(engines) == 1:
            for row in rows:
                row.dp_rank = None
        return Table(
            paused=next((engine.paused for _, engine in engines if engine.paused), None),
            num_running=sum(engine.num_running for _, engine in engines),
            num_queued=sum(engine.num_queued for _, engine in engines),
            num_preparing=sum(engine.num_preparing for _, engine in engines),
            rows=[*rows, *reversed(self._ended)],
        )

    def _known(self, seq_ids: Iterable[int]) -> list[MeasuredSequence]:
        """The open sequences with these numbers. Probes and the warm-up are not among them, because
        they are no client's."""
        return [self._open[seq_id] for seq_id in seq_ids if seq_id in self._open]


def _lost_row(output: MeasuredSequence, now: float) -> Row:
    row = _row(output, "waiting", now)
    row.why = "engine"
    return row


def _waiting_row(
    output: MeasuredSequence, place: int | None, engine: RequestList, now: float
) -> Row:
    state: State = "retracted" if output.seq_id in engine.retracted else "waiting"
    made = engine.outputs.get(output.seq_id or 0, 0)
    row = _row(output, "preparing" if place is None else state, now, made)
    row.place = place
    if engine.paused is not None:
        row.why = "paused"
    elif place is None:
        row.why = "grammar"
    else:
        row.why = engine.why if place == 1 else "blocked"
    return row


def _row(output: MeasuredSequence, state: State, now: float, made: int = 0) -> Row:
    """The row of a sequence as its client's side of the server knows it. made: how many tokens the
    engine has made, which sends those of a request that does not stream many at a time."""
    row = Row(
        rid=output.rid,
        state=state,
        route=output.path,
        prompt=output.num_prompt,
        cached=output.num_cached,
        output=max(made, output.num_outputs),
        limit=output.request.sampling.max_new_tokens,
    )
    began, timing, first = output.submitted_at, output.timing, output.first_token_at
    if began is not None:
        waited_s = None if timing is None else timing.waiting_s
        if waited_s is not None:
            row.ran_s = round(now - began - waited_s, 3)
        elif state not in ("prefill", "running"):
            waited_s = now - began
        row.waited_s = None if waited_s is None else round(waited_s, 3)
    if first is not None:
        row.ttft_s = round(first - output.arrived_at, 4)
        if now > first and row.output > 1:
            row.tps = round((row.output - 1) / (now - first), 1)
    return row
