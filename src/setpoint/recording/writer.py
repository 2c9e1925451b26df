"""Writes a recording while the engine serves (decision 0027).

The writer is an observer of the loop: the loop's thread only queues each record, and a separate
thread encodes and writes it. Any failure ends the recording and never the engine.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from setpoint.core.control import RecordingState
from setpoint.core.executor import Clock
from setpoint.core.messages import Shutdown
from setpoint.core.records import Received, Record
from setpoint.core.settings import Settings
from setpoint.core.version import __version__
from setpoint.recording.chain import Places
from setpoint.recording.codec import encode_record, field_names
from setpoint.recording.format import OFF, Header, Kept
from setpoint.recording.frames import MAX_PAYLOAD_BYTES
from setpoint.recording.kept_content import Content, Open, Withheld
from setpoint.recording.segments import Segments
from setpoint.scheduler.cache.manager import CacheConfig
from setpoint.scheduler.scheduler_config import SchedulerConfig

logger = logging.getLogger(__name__)

FLUSH_S = 0.25
"""Most seconds of its recording that a killed process loses."""
FRAME_RECORDS = 1000
MAX_WAITING = 50_000
"""Most records that may wait for the writing thread: those of some minutes on a CPU, of half a
minute on a GPU."""


class RecordingWriter:
    """An Observer. ``on`` is called by the loop's thread, ``close`` by the thread that created the
    writer."""

    def __init__(
        self,
        segments: Segments | Callable[[], Segments],
        content: Content,
        *,
        flush_s: float = FLUSH_S,
    ) -> None:
        """segments: a function creates them when the first message comes, so that an engine that
        is never used leaves no file."""
        self._begin = segments if callable(segments) else None
        self._segments = None if callable(segments) else segments
        self._content = content
        self._flush_s = flush_s
        self._waiting: deque[Record] = deque()
        self._closing = threading.Event()
        self._ended = ""
        """Why nothing is recorded any more; "" while recording. Written once, by either thread."""
        self._num_records = 0
        self._thread = threading.Thread(target=self._run, name="setpoint-recording", daemon=True)
        self._thread.start()

    def on(self, record: Record) -> None:
        if self._ended:
            return
        self._waiting.append(record)
        if len(self._waiting) > MAX_WAITING:
            self._end(f"the disk does not keep up: {MAX_WAITING} records wait")

    def state(self) -> RecordingState:
        return RecordingState(
            num_records=self._num_records,
            num_bytes=0 if self._segments is None else self._segments.num_bytes,
            ended=self._ended or None,
        )

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the waiting records and end the thread. Call it when no more records come."""
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error(
                "The last records of the recording were not written: the disk does not respond."
            )

    def _run(self) -> None:
        while not self._closing.wait(self._flush_s):
            self._flush()
        self._flush()
        if self._segments is not None:
            self._segments.close()

    def _flush(self) -> None:
        if self._ended:
            return
        try:
            if self._segments is None and self._begin is not None and self._is_used():
                self._segments = self._begin()
            if self._segments is None:
                return
            self._write_waiting()
        except Exception as error:  # no failure here may end the engine
            self._end(str(error) or type(error).__name__, error)

    def _is_used(self) -> bool:
        """Whether the engine has got a message other than that it is to end."""
        return any(
            isinstance(record, Received) and not isinstance(record.message, Shutdown)
            for record in list(self._waiting)
        )

    def _write_waiting(self) -> None:
        waiting = self._waiting
        while waiting:
            count = min(len(waiting), FRAME_RECORDS)
            self._write([encode_record(waiting.popleft(), self._content) for _ in range(count)])
            self._num_records += count

    def _write(self, rows: list[Kept]) -> None:
        """Write rows as one frame, or as several if they are too large for one."""
        payload = msgspec.msgpack.encode(rows)
        if len(payload) > MAX_PAYLOAD_BYTES and len(rows) > 1:
            middle = len(rows) // 2
            self._write(rows[:middle])
            self._write(rows[middle:])
        else:
            assert self._segments is not None
            self._segments.write(payload)

    def _end(self, why: str, error: Exception | None = None) -> None:
        self._ended = why
        self._waiting.clear()
        unexpected = None if isinstance(error, OSError) else error
        logger.error("The recording ends here: %s.", why, exc_info=unexpected)


@dataclass(slots=True, frozen=True, kw_only=True)
class RecordingConfig:
    """The recording's file, content and largest size."""

    path: Path
    content: str
    """format.OFF or format.ON."""
    max_bytes: int


def start_recording(
    config: RecordingConfig,
    *,
    scheduler: SchedulerConfig,
    settings: Settings,
    cache: CacheConfig,
    clock: Clock,
    device: str,
    when_used: bool = False,
) -> RecordingWriter:
    """Begin a recording, before the engine's first turn. when_used: create the file when the first
    message comes; otherwise now, which raises RecordingError if it cannot be created."""
    header = Header(
        version=__version__,
        recording=os.urandom(8).hex(),
        content=config.content,
        began_at=time.time(),
        clock_at=clock.now(),
        scheduler=scheduler,
        settings=settings,
        cache=cache,
        device=device,
        fields=field_names(),
    )

    def begin() -> Segments:
        return Segments(
            config.path,
            header=lambda number: msgspec.msgpack.encode(
                msgspec.structs.replace(header, segment=number)
            ),
            max_bytes=config.max_bytes,
        )

    withheld = Withheld(
        Places.of(cache.page_size, scheduler),
        vocab_size=scheduler.vocab_size,
        eos_ids=scheduler.eos_token_ids,
        key=os.urandom(32),
    )
    segments = begin if when_used else begin()
    return RecordingWriter(segments, withheld if config.content == OFF else Open())
