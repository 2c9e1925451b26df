"""Stores responses in the background, running and ended. If there is a folder, they are on disk;
the next server knows them and continues those that had not ended.
``apis.openai.responses.background`` computes them.

One write runs at a time, in a thread; changes made meanwhile are written together in the next
write. Clients see output tokens only after they are written, so that no later server has to compute
again what a client has seen (decision 0057).
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from asyncio import Future, Task
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from setpoint.core.errors import RequestError
from setpoint.core.messages import Finish
from setpoint.core.request import Request
from setpoint.frontend.storage.documents import Documents
from setpoint.frontend.storage.output_file import append_group, read_groups

logger = logging.getLogger(__name__)

KIND, ID_PREFIX = "response", "resp_"
RETRY_S = 5.0
"""Seconds until a failed write is tried again."""
ENDED = ("completed", "incomplete", "failed", "cancelled")


class ResponseInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything from which a response is computed."""

    body: dict[str, Any]
    """The body as the client sent it."""
    request: Request
    """The engine's request, with its seed and without outputs."""
    model: str
    """The server's description of its weights."""
    tokenizer: str
    """The source of its tokenizer."""
    inputs: list[dict[str, Any]]
    """The input items, as in KeptResponse."""
    earlier: list[dict[str, Any]]


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The document of a response."""

    id: str
    asked: ResponseInputs
    response: dict[str, Any]
    """The response as the API shows it."""
    num_tries: int = 1
    """Number of servers in turn that have begun to compute it without getting a new token."""
    num_cached: int | None = None
    """Cached tokens of the prompt when it was first computed; None if it has not been computed."""
    finish: Finish | None = None
    """How the engine ended it; None if it did not."""
    output_ids: bytes = b""
    """The packed output ids of an ended response. Those of a running one are in a separate file."""


class BackgroundResponse:
    """A response in the memory of this server. Used on the event loop only."""

    def __init__(self, stored: StoredResponse, ids: bytes = b"", file_end: int = 0) -> None:
        """ids: the stored output ids. file_end: the offset at which the next group in its file
        begins."""
        self.stored = stored
        self.ids = array("i", ids)
        self.num_shown = len(self.ids)
        """Number of output ids that followers may see."""
        self.has_ended = _has_ended(stored)
        """Whether followers may see its end."""
        self.interruption = ""
        """Why this server has stopped computing it although it has not ended; "" if it has not
        stopped."""
        self.task: Task[None] | None = None
        """The task that computes it."""
        self.is_cancelled = False
        """Whether a client has asked for its end."""
        self.is_saved = True
        """Whether its document on disk equals ``stored``; set by the book."""
        self.num_written = len(self.ids)
        """Number of ids in its file; set by the book, like the next two."""
        self.file_end = file_end
        self.has_failed = False
        """Whether the last write to its file has failed."""
        self._waiting: list[Future[None]] = []

    @property
    def id(self) -> str:
        return self.stored.id

    def change(self, **changes: Any) -> None:
        """Change the document. It reaches the disk with the book's next ``write`` or ``save``."""
        self.stored = msgspec.structs.replace(self.stored, **changes)
        self.is_saved = False

    async def wait_until_shown(self) -> None:
        """Wait until followers may see more than now."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def show(self, num_ids: int, *, has_ended: bool) -> None:
        """Let followers see this many ids, and the end if ``has_ended``."""
        self.num_shown, self.has_ended = num_ids, has_ended
        self.wake()

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


@dataclass(slots=True)
class _Write:
    """The data of a response that is to be written, and the outcome of the write."""

    response: BackgroundResponse
    ids: bytes
    num_ids: int
    """Number of ids of the response, including these."""
    document: StoredResponse | None
    has_ended: bool
    file_end: int
    error: OSError | None = None


class BackgroundBook:
    """Used on the event loop only."""

    def __init__(self, folder: Path | None = None, documents: Documents | None = None) -> None:
        """Read what an earlier server has stored. folder: the folder for outputs. If it is None,
        nothing is stored, and ``documents`` must be None, too."""
        self._folder = folder
        self._documents = documents
        self.responses: dict[str, BackgroundResponse] = {}
        """Id -> response, the oldest first."""
        self._due: dict[BackgroundResponse, None] = {}
        self._due_removals: set[str] = set()
        self._failed: dict[BackgroundResponse, None] = {}
        """Responses whose write failed and is tried again later."""
        self._failed_removals: set[str] = set()
        self._retrying: asyncio.TimerHandle | None = None
        self._savers: list[Future[None]] = []
        """Futures of the callers that wait for the next write."""
        self._writer: Task[None] | None = None
        self._has_failed = False
        """Whether the last write of documents has failed."""
        if documents is not None:
            self._load(documents)

    @property
    def is_stored(self) -> bool:
        """Whether responses outlive this server."""
        return self._folder is not None

    def unfinished(self) -> list[BackgroundResponse]:
        return [each for each in self.responses.values() if not each.has_ended]

    async def add(self, response: BackgroundResponse) -> None:
        """Store a new response. Raises RequestError (507) and forgets the response if it cannot be
        stored."""
        self.responses[response.id] = response
        response.is_saved = False
        try:
            await self.save(response)
        except RequestError:
            self.forget(response.id)
            raise

    def add_ids(self, response: BackgroundResponse, ids: Sequence[int]) -> None:
        """Add outputs. They are shown after they are written, together with the document if it has
        changed."""
        response.ids.extend(ids)
        self.write(response)

    def write(self, response: BackgroundResponse) -> None:
        """Write the changes in the background, and then show them."""
        if response.id not in self.responses:
            return
        if self._folder is None:
            response.is_saved = True
            response.show(len(response.ids), has_ended=_has_ended(response.stored))
            return
        self._due[response] = None
        self._write_soon()

    async def save(self, *responses: BackgroundResponse) -> None:
        """Like ``write``, and wait for this write and all earlier writes and removals. Raises
        RequestError (507) if it fails; it is tried again later."""
        for response in responses:
            self.write(response)
        if self._folder is not None:
            future: Future[None] = asyncio.get_running_loop().create_future()
            self._savers.append(future)
            self._write_soon()
            await future

    def forget(self, own_id: str) -> None:
        """Remove a response; it is removed from the disk as soon as possible."""
        response = self.responses.pop(own_id, None)
        if response is not None and self._folder is not None:
            self._due.pop(response, None)
            self._failed.pop(response, None)
            self._due_removals.add(own_id)
            self._write_soon()

    def _load(self, documents: Documents) -> None:
        folder = self._folder
        assert folder is not None
        for stored in documents.all(KIND, StoredResponse):
            ids, end = stored.output_ids, 0
            if not _has_ended(stored):
                try:
                    ids, end, num_damaged = read_groups(self._file(stored.id))
                except OSError as error:
                    num_damaged = 0
                    logger.warning(
                        "The stored output of %s cannot be read (%s): it is computed again.",
                        stored.id,
                        error.strerror,
                    )
                if num_damaged:
                    logger.warning(
                        "The last %d bytes of the stored output of %s are damaged: the response"
                        " continues after token %d, and the tokens after it are computed again.",
                        num_damaged,
                        stored.id,
                        len(ids) // 4,
                    )
            self.responses[stored.id] = BackgroundResponse(stored, ids, end)
        running = {each.id for each in self.unfinished()}
        # Files that belong to a damaged document may still be needed.
        kept = running | (documents.ids(KIND) - set(self.responses))
        for path in folder.glob(f"{ID_PREFIX}*"):
            if path.name not in kept:
                try:
                    path.unlink()
                except OSError as error:
                    logger.warning("%s belongs to no response and stays: %s.", path, error.strerror)

    def _file(self, own_id: str) -> Path:
        assert self._folder is not None
        return self._folder / own_id

    def _write_soon(self) -> None:
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        while self._due or self._due_removals or self._savers:
            writes = [self._write_of(each) for each in self._due]
            removals, savers = self._due_removals, self._savers
            self._due, self._due_removals, self._savers = {}, set(), []
            error = await asyncio.to_thread(self._put, writes, removals)
            for write in writes:
                self._show_written(write, is_saved=error is None)
            self._log_storage(error, any(write.document is not None for write in writes))
            if error is not None:
                self._failed_removals |= removals
            for saver in savers:
                if saver.done():
                    continue  # the waiting caller has been cancelled
                if error is None:
                    saver.set_result(None)
                else:
                    saver.set_exception(error)
            if (self._failed or self._failed_removals) and self._retrying is None:
                loop = asyncio.get_running_loop()
                self._retrying = loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retrying = None
        self._due |= {each: None for each in self._failed if each.id in self.responses}
        self._due_removals |= self._failed_removals
        self._failed, self._failed_removals = {}, set()
        self._write_soon()

    def _write_of(self, response: BackgroundResponse) -> _Write:
        stored = response.stored
        has_ended = _has_ended(stored)
        # The document of an ended response contains all ids.
        new = b"" if has_ended else response.ids[response.num_written :].tobytes()
        document = None if response.is_saved else stored
        return _Write(response, new, len(response.ids), document, has_ended, response.file_end)

    def _put(self, writes: Sequence[_Write], removals: set[str]) -> RequestError | None:
        """Write, in a thread. The ids are written first: otherwise a document could count tokens
        that are not stored."""
        for write in writes:
            if write.ids:
                try:
                    path = self._file(write.response.id)
                    write.file_end = append_group(path, write.ids, at=write.file_end)
                except OSError as error:
                    write.error = error
        documents = [write.document for write in writes if write.document is not None]
        assert self._documents is not None
        try:
            if documents or removals:
                self._documents.change(KIND, put=documents, remove=removals)
        except RequestError as error:
            return error
        ended = {each.id for each in documents if _has_ended(each)}
        for own_id in ended | removals:
            with suppress(OSError):  # the next server removes it
                self._file(own_id).unlink(missing_ok=True)
        return None

    def _show_written(self, write: _Write, *, is_saved: bool) -> None:
        """Show what was written. If the write failed, show it nevertheless: the write is tried
        again, and a server that starts before that computes the same tokens again."""
        response = write.response
        if write.document is not None and write.document is response.stored:
            response.is_saved = is_saved
        if write.error is None:
            response.num_written, response.file_end = write.num_ids, write.file_end
            response.has_failed = False
        elif not response.has_failed:
            response.has_failed = True
            logger.error(
                "The outputs of %s cannot be stored (%s). The response continues, and the server"
                " tries again.",
                response.id,
                write.error.strerror,
            )
        if write.error is not None or (write.document is not None and not is_saved):
            self._failed[response] = None
        response.show(write.num_ids, has_ended=write.has_ended)

    def _log_storage(self, error: RequestError | None, has_documents: bool) -> None:
        """has_documents: whether there were documents to write. A write without them succeeds on a
        full disk as well."""
        if error is not None and not self._has_failed:
            logger.error("Responses in the background cannot be stored at the moment: %s", error)
            self._has_failed = True
        elif self._has_failed and has_documents and not (error or self._failed):
            logger.info("Responses in the background are stored again.")
            self._has_failed = False


def _has_ended(stored: StoredResponse) -> bool:
    return stored.response["status"] in ENDED
