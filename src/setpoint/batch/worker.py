"""Runs the batches that clients of a server have created (``/v1/batches``), one after the other in
the order of their creation, beside the server's other requests.

Works on a Service with a storage. What a batch has done is in its journal, so a server that was
killed continues the batch where it stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing

from setpoint.batch import output_record as record
from setpoint.batch.entry import BatchError, Marks, Problem, Survey
from setpoint.batch.journal import Journal
from setpoint.batch.jsonl import JsonlSource
from setpoint.batch.output import AsTheyCome
from setpoint.batch.reading import read_ahead
from setpoint.batch.run import BatchRun
from setpoint.batch.tally import Tally
from setpoint.core.errors import EngineDeadError, RequestError, SetpointError
from setpoint.frontend.answering import Answering
from setpoint.frontend.feed import BackgroundGate
from setpoint.frontend.storage.batches import Batch, BatchFault
from setpoint.frontend.storage.documents import new_id
from setpoint.frontend.storage.files import PREFIX, Upload
from setpoint.frontend.storage.storage import Storage

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two looks at a running batch: its counts, and whether its time is up."""
IDLE_S = 60.0
"""Seconds between two looks for expired files while no batch runs."""
RETRY_S = 5.0
"""Seconds before a batch continues that a dead engine or a full disk interrupted."""
PATIENCE_S = (1.0, 4.0, 16.0, 64.0)
"""Seconds before each further try of a request that a busy engine has refused."""
OUTPUT_PURPOSE = "batch_output"
_CHUNK_BYTES = 1 << 18
"""Bytes that are worked on before the event loop gets its turn."""


class InvalidInputError(SetpointError):
    """A file that cannot be the input of a batch."""


class InterruptedBatchError(SetpointError):
    """A batch that cannot go on now, e.g. because the disk is full; its journal is kept."""


class BatchWorker:
    def __init__(self, answering: Answering, storage: Storage) -> None:
        self._answering = answering
        self._files, self._book, self._now = storage.files, storage.batches, storage.now

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            self._book.changed.clear()
            batch = next(iter(self._book.unfinished()), None)
            if batch is None:
                self._files.listing()  # forgets what has expired
                await self._changed(IDLE_S)
                continue
            try:
                await self._work(batch)
            except InvalidInputError as error:
                await self._fail(batch, BatchFault("invalid_input", str(error)))
            except (InterruptedBatchError, EngineDeadError, RequestError) as error:
                logger.warning("Batch %s is interrupted, but will continue: %s", batch.id, error)
                await self._changed(RETRY_S)
            except Exception:
                # A bug or a damaged journal must not keep the other batches from their answers.
                logger.exception("An internal error ended batch %s.", batch.id)
                fault = BatchFault("internal_error", "Internal error; the log has the details.")
                await self._fail(batch, fault)

    async def _fail(self, batch: Batch, fault: BatchFault) -> None:
        try:
            await self._book.advance(batch.id, "failed", errors=[fault])
        except RequestError as error:
            logger.warning("The failure of batch %s could not be stored: %s", batch.id, error)

    async def _work(self, batch: Batch) -> None:
        """Take a batch from wherever it is to its end. Raises InvalidInputError,
        InterruptedBatchError, EngineDeadError, RequestError (507), BatchError for a damaged
        journal."""
        with ExitStack() as stack:
            try:
                source = stack.enter_context(closing(self._source(batch)))
                survey = await asyncio.to_thread(source.survey)
            except BatchError as error:
                path = str(self._files.path(batch.input_file_id))  # clients do not know this path
                raise InvalidInputError(str(error).replace(path, "The input file")) from None
            if not survey.num_requests:
                raise InvalidInputError("The input file holds no requests.")
            if self._book.get(batch.id).status == "validating":
                await self._book.advance(batch.id, "in_progress", num_requests=survey.num_requests)
            tally = await self._answer(batch.id, source, survey)
            await self._finalize(batch.id, source, survey, tally)

    def _source(self, batch: Batch) -> JsonlSource:
        path = self._files.path(batch.input_file_id)
        return JsonlSource(path, max_body_bytes=self._answering.config.max_body_bytes)

    async def _answer(self, batch_id: str, source: JsonlSource, survey: Survey) -> Tally:
        """Answer the open requests until none is left, the batch is cancelled or its time is up."""
        tally, stop = Tally(survey.num_requests), asyncio.Event()
        batch = self._book.get(batch_id)
        with Journal(self._book.journal(batch)) as journal:
            done = await asyncio.to_thread(journal.recover, survey, tally, in_order=False)
            if tally.num_done == tally.num_requests or self._is_over(batch_id):
                return tally
            run = BatchRun(
                self._answering,
                journal,
                AsTheyCome(journal),
                tally,
                digest=survey.digest,
                endpoint=batch.endpoint,
                make_gate=BackgroundGate,
                patience_s=PATIENCE_S,
            )
            watching = asyncio.create_task(self._watch(batch_id, tally, stop))
            try:
                entries = read_ahead(source.entries(survey, done))
                await run.run(entries, stop=stop, drain_s=0.0)
                await asyncio.to_thread(journal.sync)
            except BatchError as error:
                raise InterruptedBatchError(str(error)) from None
            finally:
                watching.cancel()
        return tally

    async def _watch(self, batch_id: str, tally: Tally, stop: asyncio.Event) -> None:
        """Tell the book how far the batch is, and set ``stop`` when it must end."""
        while not self._is_over(batch_id):
            self._count(batch_id, tally)
            await self._changed(LOOK_S)
            self._book.changed.clear()
        stop.set()

    def _is_over(self, batch_id: str) -> bool:
        batch = self._book.get(batch_id)
        return batch.is_cancelled or batch.expires_at <= self._now()

    def _count(self, batch_id: str, tally: Tally) -> None:
        self._book.count(
            batch_id, num_answered=tally.num_done - tally.num_failed, num_failed=tally.num_failed
        )

    async def _finalize(
        self, batch_id: str, source: JsonlSource, survey: Survey, tally: Tally
    ) -> None:
        """Write the batch's two files from its journal. After a crash it starts again and replaces
        what it has written."""
        self._count(batch_id, tally)
        batch = self._book.get(batch_id)
        if batch.output_file_id is None:
            batch = await self._book.advance(
                batch_id,
                "cancelling" if batch.is_cancelled else "finalizing",
                output_file_id=new_id(PREFIX),
                error_file_id=new_id(PREFIX),
            )
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        with ExitStack() as stack:
            answers = stack.enter_context(self._files.output(batch.output_file_id))
            errors = stack.enter_context(self._files.output(batch.error_file_id))
            with Journal(self._book.journal(batch)) as journal:
                again = Tally(survey.num_requests)
                done = await asyncio.to_thread(journal.recover, survey, again, in_order=False)
            await self._sort(batch, answers, errors)
            is_expired = tally.num_done < tally.num_requests and not batch.is_cancelled
            if is_expired:
                await _write_all(errors, self._expired(source, survey, done))
            kept: dict[str, str | None] = {}
            for key, upload in (("output_file_id", answers), ("error_file_id", errors)):
                kept[key] = None
                if upload.num_bytes:
                    name = f"{batch.id}_{'output' if upload is answers else 'error'}.jsonl"
                    file = await upload.finish(
                        filename=name,
                        purpose=OUTPUT_PURPOSE,
                        expires_after_s=batch.output_expires_after_s,
                    )
                    kept[key] = file.id
        status = "cancelled" if batch.is_cancelled else "expired" if is_expired else "completed"
        num_failed = tally.num_failed + is_expired * (tally.num_requests - tally.num_done)
        await self._book.advance(batch.id, status, num_failed=num_failed, **kept)
        self._book.journal(batch).unlink(missing_ok=True)

    async def _sort(self, batch: Batch, answers: Upload, errors: Upload) -> None:
        """Copy the journal's records: those with an answer to one file, failures to the other."""
        with self._book.journal(batch).open("rb") as journal:
            while lines := journal.readlines(_CHUNK_BYTES):
                split: dict[bool, list[bytes]] = {True: [], False: []}
                for line in lines:
                    head = record.decode_head(line)
                    assert head is not None, "the journal was just checked"
                    split[head.error is None].append(line)
                await answers.write(b"".join(split[True]))
                await errors.write(b"".join(split[False]))

    def _expired(self, source: JsonlSource, survey: Survey, done: Marks) -> Iterator[bytes]:
        problem = Problem(
            "batch_expired", "The completion window of the batch ended before this request began."
        )
        for entry in source.entries(survey, done):
            yield record.encode(record.failure_record(survey.digest, entry, problem))

    async def _changed(self, timeout_s: float) -> None:
        """Wait until a batch was created or cancelled, at most ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._book.changed.wait()
        except TimeoutError:
            pass


async def _write_all(upload: Upload, lines: Iterator[bytes]) -> None:
    chunk = bytearray()
    for line in lines:
        chunk += line
        if len(chunk) >= _CHUNK_BYTES:
            await upload.write(bytes(chunk))
            chunk.clear()
    await upload.write(bytes(chunk))
