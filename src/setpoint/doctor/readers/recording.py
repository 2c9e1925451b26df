"""Reads a recording (``setpoint serve --record FILE``). Moments are made from its records by the
same code as in an engine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

from setpoint.core.errors import RecordingError, SourceError
from setpoint.core.moments import Moment, quantile
from setpoint.core.records import PoolRebuilt, Record, RequestDone, SettingsChanged, Turn
from setpoint.core.settings import Settings
from setpoint.doctor.observations import Event, Facts, Observations
from setpoint.doctor.readers.info import tell
from setpoint.doctor.readers.kept import rank_observations
from setpoint.doctor.timeline import Timeline
from setpoint.observe.moment_keeper import MomentKeeper
from setpoint.recording.codec import as_record
from setpoint.recording.format import (
    Header,
    Kept,
    KeptRecord,
    KeptTurn,
    consistent,
)
from setpoint.recording.recording_reader import Recording, open_recording


def open_source(name: str) -> Recording:
    """Open a recording. Raises SourceError if it cannot be read from its beginning."""
    try:
        return open_recording(Path(name))
    except RecordingError as error:
        raise SourceError(str(error)) from None


def read_recording(
    recording: Recording, name: str, *, also: Callable[[Kept | Record], None] | None = None
) -> Observations:
    """The observations of a recording, up to any damage. Raises SourceError for one that
    contradicts itself. also: called with each row, or with the record of a row that holds one."""
    notes: list[str] = []
    reading = _Reading(recording.header)
    try:
        with consistent():
            _read(recording, reading, also)
    except RecordingError as error:
        notes.append(f"{error} The report is about what is before that.")
    try:
        with consistent():
            seen = rank_observations(
                reading.facts(), reading.moments(), name=name, kind="recording", notes=notes
            )
    except RecordingError as error:
        raise SourceError(f"{name}: {error}") from error
    seen.sources[0].notes += recording.notes
    (rank,) = seen.ranks
    rank.events += reading.leaks
    if reading.leaks:
        rank.num_events["leak"] = len(reading.leaks)
    return seen


def _read(
    recording: Recording, reading: _Reading, also: Callable[[Kept | Record], None] | None
) -> None:
    for row in recording:
        read: Kept | Record = row
        match row:
            case KeptTurn(at):
                reading.keeper.on(Turn(at))
            case KeptRecord():
                read = as_record(row, recording.header.fields)
                reading.take(read)
        if also is not None:
            also(read)


class _Reading:
    def __init__(self, header: Header) -> None:
        self._header = header
        self._epoch = header.began_at - header.clock_at
        self.keeper = MomentKeeper(epoch=self._epoch, kept=None)
        self._settings = header.settings
        self._first: list[tuple[float, float]] = []
        """(when a first token came, in seconds of the clock, how long after its request)."""
        self._between: list[tuple[float, float]] = []
        """(when a request ended, the mean time between its tokens)."""
        self.leaks: list[Event] = []

    def take(self, record: Record) -> None:
        self.keeper.on(record)
        match record:
            case RequestDone():
                self._done(record)
            case SettingsChanged():
                self._settings = record.settings
            case PoolRebuilt(violations):
                text = f"The accounting of the KV pool was wrong: {'; '.join(violations)}"
                self.leaks.append(Event("leak", None, 0, text))

    def facts(self) -> Facts:
        header, settings = self._header, self._settings
        pool = header.cache.num_pages * header.cache.page_size
        facts = Facts(
            engine="setpoint",
            version=header.version,
            device="cpu" if header.device == "cpu" else "gpu",
            options=_options(settings),
            max_total_num_tokens=pool,
            max_running_requests=settings.max_running_requests,
            chunked_prefill_size=settings.chunked_prefill_size or -1,
            max_prefill_tokens=settings.max_prefill_tokens,
            context_len=header.scheduler.max_req_len,
        )
        tell(facts, "The recording says")
        return facts

    def moments(self) -> list[Moment]:
        self.keeper.finish()
        moments = self.keeper.since(0).moments
        self._add_latencies("ttft", self._first, moments)
        self._add_latencies("itl", self._between, moments)
        timeline = Timeline()
        for moment in moments:
            timeline.add(moment)
        return timeline.moments()

    def _done(self, done: RequestDone) -> None:
        if done.first_token_at is None or done.accepted_at is None:
            return
        self._first.append((done.first_token_at, done.first_token_at - done.accepted_at))
        if done.num_outputs > 1:
            each_s = (done.ended_at - done.first_token_at) / (done.num_outputs - 1)
            self._between.append((done.ended_at, each_s))

    def _add_latencies(
        self, name: str, values: list[tuple[float, float]], moments: list[Moment]
    ) -> None:
        begins = [moment.at for moment in moments]
        found: dict[int, list[float]] = {}
        for at, seconds in values:
            place = max(bisect_right(begins, at + self._epoch) - 1, 0)
            found.setdefault(place, []).append(seconds)
        for place, latencies in found.items():
            latencies.sort()
            for share in (50, 95, 99):
                moments[place].quantiles[f"{name}_p{share}"] = quantile(latencies, share / 100)


def _options(settings: Settings) -> dict[str, object]:
    """The settings by the names of their options."""
    return {
        "max_running_requests": settings.max_running_requests,
        "schedule_conservativeness": settings.conservativeness,
        "schedule_policy": settings.policy,
        "chunked_prefill_size": settings.chunked_prefill_size or -1,
        "max_prefill_tokens": settings.max_prefill_tokens,
        "enable_mixed_chunk": settings.mixed_chunk,
        "decode_log_interval": settings.decode_log_interval,
        "stream_interval": settings.stream_interval,
    }
