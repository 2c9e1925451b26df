"""Everything that the page shows of a recording: facts, moments with the limit that bound in each,
and, for any time, the table of requests and the doctor's report about the time before it."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from setpoint.core.errors import SourceError
from setpoint.core.moments import Moment
from setpoint.doctor.binding_limit import binding_limit
from setpoint.doctor.case import examine
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.contract import contract
from setpoint.doctor.observations import Observations
from setpoint.doctor.readers.kept import rank_observations
from setpoint.doctor.readers.recording import open_source, read_recording
from setpoint.playback.request_timelines import Lives

REPORT_S = 120.0
"""The report at a time is about this many seconds before it."""
CACHED = 512
"""Seconds whose tables and reports are cached."""


class Film:
    def __init__(self, name: str) -> None:
        """Read the recording. Raises SourceError for a file that is not a recording, or that has no
        moments."""
        self._name = name
        recording, self.lives = open_source(name), Lives()
        self.seen = read_recording(recording, name, also=self.lives.take)
        self.lives.finish()
        self._moments = self.seen.ranks[0].moments
        if not self._moments:
            notes = "".join(f" {note}" for note in self.notes)
            raise SourceError(f"{name} contains no step of its server.{notes}")
        header = recording.header
        self._epoch = header.began_at - header.clock_at
        self._begins = [moment.at for moment in self._moments]
        self._at = lru_cache(CACHED)(self._at_second)

    def recording(self) -> dict[str, Any]:
        """The events of the page's stream, all at once: ``state`` and ``moments``."""
        return {"state": self._state(), "moments": self._moment_events(), "notes": self.notes}

    @property
    def notes(self) -> list[str]:
        """What the user should know about the recording, e.g. that it was cut."""
        found = [note for source in self.seen.sources for note in source.notes]
        if self.lives.num_dropped:
            found.append(f"Its first {self.lives.num_dropped} requests are not in the table.")
        return found

    def at(self, time: float) -> dict[str, Any]:
        """``requests`` and ``doctor`` as they were at a time. time: seconds since 1970."""
        end = self._moments[-1].at + self._moments[-1].seconds
        # The last second is shown to its end.
        return self._at(math.ceil(end) if time >= end else round(max(time, self._begins[0])))

    def _at_second(self, time: int) -> dict[str, Any]:
        past = self._moments[: bisect_right(self._begins, time)]
        moment = past[-1] if past else None
        recent = [each for each in past if each.at >= time - REPORT_S]
        report = diagnose(self._observations(recent))
        return {
            "at": time,
            "requests": self.lives.table(time - self._epoch, self._epoch, moment),
            "doctor": contract(report),
        }

    def _observations(self, moments: list[Moment]) -> Observations:
        (source,) = self.seen.sources
        part = rank_observations(self.seen.facts, moments, name=source.name, kind="recording")
        return replace(part, facts=self.seen.facts)

    def _moment_events(self) -> list[dict[str, Any]]:
        limits = replace(examine(self.seen).limits, reasons=True)
        events = []
        for moment in self._moments:
            content = msgspec.to_builtins(msgspec.structs.replace(moment, text=""))
            limit = binding_limit(moment, limits)
            events.append(content | ({} if limit == "unknown" else {"limit": limit}))
        return events

    def _state(self) -> dict[str, Any]:
        facts = self.seen.facts
        return {
            "model": Path(self._name).name,
            "model_path": self._name,
            "version": facts.version,
            "device": facts.device,
            "chats": False,
            "context_len": facts.context_len,
            "pool_tokens": facts.max_total_num_tokens,
            "limits": {
                "max_running_requests": facts.max_running_requests,
                "max_prefill_tokens": facts.max_prefill_tokens,
                "chunked_prefill_size": facts.chunked_prefill_size,
            },
            "paused": None,
            "options": [
                {"field": name, "value": value, "why": "at the end of the recording", "warn": False}
                for name, value in facts.options.items()
            ],
        }
