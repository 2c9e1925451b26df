"""The inputs of a recorded engine for a replay: requests and sampled tokens, with their ids or with
surrogates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from setpoint.core.errors import RecordingError
from setpoint.core.messages import Submit
from setpoint.core.request import Ids, unpack_ids
from setpoint.recording import surrogates
from setpoint.recording.chain import Places
from setpoint.recording.format import OFF, Kept, KeptArrival, KeptResult
from setpoint.recording.kept_content import Content, Open, Surrogates
from setpoint.recording.recording_reader import Recording
from setpoint.scheduler.scheduler_config import SchedulerConfig


class ReplayScript(Protocol):
    config: SchedulerConfig
    """The configuration of the replay's scheduler."""
    content: Content
    """Encodes the replay's own records so that they can be compared with the recorded ones."""

    def arrival(self, row: KeptArrival) -> Submit:
        """The Submit for an arrival whose content was withheld."""
        ...

    def token_ids(self, row: KeptResult, seq_ids: list[int]) -> Ids:
        """The sampled token ids of a result. seq_ids: the sequences of the rows that sample."""
        ...


class _OriginalScript:
    """The script of a recording with content: messages and tokens are used unchanged."""

    def __init__(self, recording: Recording) -> None:
        self.config = recording.header.scheduler
        self.content: Content = Open()

    def arrival(self, row: KeptArrival) -> Submit:
        raise RecordingError(
            "The recording says that it holds content, but the content of a request is withheld."
        )

    def token_ids(self, row: KeptResult, seq_ids: list[int]) -> Ids:
        return unpack_ids(row.ids)


class _SurrogateScript:
    """The script of a recording whose content was withheld. There is no common end-of-sequence id:
    each sequence has a stop id of its own."""

    def __init__(self, recording: Recording) -> None:
        header = recording.header
        self.content: Content = Surrogates()
        places = Places.of(header.cache.page_size, header.scheduler)
        self._outlines = surrogates.outlines(_readable(recording), places)
        # Every id is smaller than this. A mask has a bit for each, so there must not be more.
        vocab_size = 1 + sum(outline.num_ids for outline in self._outlines.values())
        self.config = replace(header.scheduler, vocab_size=vocab_size, eos_token_ids=frozenset())
        self._ids = surrogates.SurrogateIds(places)

    def arrival(self, row: KeptArrival) -> Submit:
        request = surrogates.request_of(row, self._outlines[row.seq_id], self._ids)
        return Submit(row.seq_id, request)

    def token_ids(self, row: KeptResult, seq_ids: list[int]) -> Ids:
        return surrogates.tokens_of(row, seq_ids, self._outlines)


def _readable(recording: Recording) -> Iterator[Kept]:
    """All rows before the first damage, which the replay will report."""
    with suppress(RecordingError):
        yield from recording


def load_script(recording: Recording) -> ReplayScript:
    """The script of a recording. If content was withheld, reads the recording to its end."""
    withheld = recording.header.content == OFF
    return _SurrogateScript(recording) if withheld else _OriginalScript(recording)
