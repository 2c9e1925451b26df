"""Stores the batches of a server: what clients asked for, and how far each batch is. Every change
is written to disk, so that the next server continues unfinished batches. ``setpoint.batch.worker``
runs the batches, and reads and advances them here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import quoted
from setpoint.frontend.storage.documents import Documents, new_id
from setpoint.frontend.storage.files import UploadStore

KIND, PREFIX = "batch", "batch_"
MAX_BATCHES = 1000
"""Maximum number of batches. A new batch replaces the oldest one that has ended, whose files
stay."""
BATCH_PURPOSE = "batch"
"""Purpose of a file that a batch may read."""

ENDED = ("failed", "completed", "expired", "cancelled")


class BatchFault(msgspec.Struct, frozen=True):
    """Why a batch failed as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    endpoint: str
    """The route that answers every request of the batch."""
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    """Seconds after which the files that the batch writes are deleted; None: never."""
    status: str = "validating"
    """validating, in_progress, finalizing, cancelling, or one of ENDED."""
    times: dict[str, int] = {}
    """Status -> when the batch took it."""
    errors: list[BatchFault] = []
    output_file_id: str | None = None
    """Set when finalizing begins; the file exists when the batch has ended and has answers."""
    error_file_id: str | None = None
    num_requests: int = 0
    num_answered: int = 0
    num_failed: int = 0

    @property
    def is_cancelled(self) -> bool:
        """Whether a client has cancelled it."""
        return "cancelling" in self.times


class BatchBook:
    """Used on the event loop only."""

    def __init__(
        self,
        folder: Path,
        documents: Documents,
        files: UploadStore,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Read what an earlier server has stored. folder: the folder for journals."""
        self._folder = folder
        self._documents = documents
        self._files = files
        self._now = now
        self._batches = {batch.id: batch for batch in documents.all(KIND, Batch)}
        for batch in self._batches.values():
            if batch.status in ENDED:
                self.journal(batch).unlink(missing_ok=True)
            else:
                files.hold(batch.input_file_id, batch.id)
        self._writing = asyncio.Lock()
        self.changed = asyncio.Event()
        """Set when a batch was created or cancelled; the worker clears it."""

    def journal(self, batch: Batch) -> Path:
        """The file in which the answers of an unfinished batch are collected."""
        return self._folder / f"{batch.id}.journal.jsonl"

    def listing(self) -> list[Batch]:
        """All batches, oldest first."""
        return list(self._batches.values())

    def unfinished(self) -> list[Batch]:
        return [batch for batch in self._batches.values() if batch.status not in ENDED]

    def get(self, batch_id: str) -> Batch:
        """The batch with this id. Raises RequestError (404)."""
        batch = self._batches.get(batch_id)
        if batch is None:
            raise RequestError(
                f"There is no batch {quoted(batch_id, 64)}.",
                status_code=404,
            )
        return batch

    async def create(
        self,
        *,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        window_s: int,
        metadata: Mapping[str, str] | None,
        output_expires_after_s: int | None,
    ) -> Batch:
        """Create a batch. Raises RequestError: 404 for a file that does not exist, 400 for a file
        with another purpose or too many unfinished batches, 507 if it cannot be stored."""
        file = self._files.get(input_file_id)
        if file.purpose != BATCH_PURPOSE:
            raise RequestError(
                f"input_file_id: file {file.id} has the purpose {file.purpose!r}; a batch reads"
                f" files with the purpose {BATCH_PURPOSE!r}."
            )
        self._make_room()
        created_at = int(self._now())
        batch = Batch(
            id=new_id(PREFIX),
            endpoint=endpoint,
            input_file_id=file.id,
            completion_window=completion_window,
            created_at=created_at,
            expires_at=created_at + window_s,
            metadata=None if metadata is None else dict(metadata),
            output_expires_after_s=output_expires_after_s,
        )
        self._batches[batch.id] = batch
        self._files.hold(file.id, batch.id)
        try:
            await self._save(batch.id)
        except RequestError:
            self._files.release(file.id, batch.id)
            del self._batches[batch.id]
            raise
        self.changed.set()
        return batch

    async def cancel(self, batch_id: str) -> Batch:
        """Ask for the end of a batch. Raises RequestError: 404 if there is no such batch, 400 if it
        is ending or has ended by itself, 507 if the change cannot be stored."""
        batch = self.get(batch_id)
        if batch.is_cancelled:
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise RequestError(f"Batch {batch.id} is {batch.status}; it cannot be cancelled.")
        batch = await self.advance(batch.id, "cancelling")
        self.changed.set()
        return batch

    async def advance(self, batch_id: str, status: str, **changes: Any) -> Batch:
        """Give a batch its next status and other changed fields. Raises RequestError (507) if the
        change cannot be stored; in memory, the batch has the status nevertheless."""
        batch = self._batches[batch_id]
        self._batches[batch_id] = msgspec.structs.replace(
            batch, status=status, times={status: int(self._now()), **batch.times}, **changes
        )
        if status in ENDED:
            self._files.release(batch.input_file_id, batch.id)
        await self._save(batch_id)
        return self._batches[batch_id]

    def count(self, batch_id: str, *, num_answered: int, num_failed: int) -> None:
        """Set how many requests have ended. This is not written to disk, because the journal has
        it."""
        self._batches[batch_id] = msgspec.structs.replace(
            self._batches[batch_id], num_answered=num_answered, num_failed=num_failed
        )

    async def _save(self, batch_id: str) -> None:
        # One at a time, so that an older state never replaces a newer one.
        async with self._writing:
            await asyncio.to_thread(self._documents.put, KIND, self._batches[batch_id])

    def _make_room(self) -> None:
        """Forget the oldest batch that has ended, if there are too many."""
        if len(self._batches) < MAX_BATCHES:
            return
        oldest = next((batch for batch in self._batches.values() if batch.status in ENDED), None)
        if oldest is None:
            raise RequestError(
                f"{MAX_BATCHES} batches already wait or run, the limit of this server; retry"
                " later.",
                status_code=429,
            )
        del self._batches[oldest.id]
        self._documents.remove(KIND, oldest.id)
        self.journal(oldest).unlink(missing_ok=True)
