"""Runs a batch against a service: submits requests when the engine has room, and writes one record
per request.

Works on Entries and a Service; knows no file format, no terminal and no signals. The caller decides
when to stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Sequence

from setpoint.batch import output_record as record
from setpoint.batch.entry import BatchError, Entry, Problem
from setpoint.batch.journal import Journal
from setpoint.batch.output import Output
from setpoint.batch.tally import Tally
from setpoint.core.errors import RequestError, SetpointError
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.openai.replies import Exchange
from setpoint.frontend.apis.openai.route_table import Api, openai_apis
from setpoint.frontend.feed import BatchGate, EngineView
from setpoint.frontend.jobs import Job

logger = logging.getLogger(__name__)

SYNC_S = 1.0
"""Seconds between syncs. Answers younger than this may be lost in a power cut; they are then
computed again."""
LONG_BYTES = 1 << 16
LONG_NUMBERS = 1 << 13
"""An entry with more bytes, or an answer with more logprobs, is worked on in a thread: on a server
others wait meanwhile."""
UNAVAILABLE = 503
"""Status of a request that might be answered at another time, for example when a queue is full."""

EncodedRecord = tuple[bytes, record.Error | None]
"""An encoded record, and the error in it."""


class BatchRun:
    def __init__(
        self,
        answering: Answering,
        journal: Journal,
        output: Output,
        tally: Tally,
        *,
        digest: str,
        endpoint: str | None = None,
        make_gate: Callable[[EngineView], BatchGate] = BatchGate,
        patience_s: Sequence[float] = (),
    ) -> None:
        """endpoint: the one route that the requests may name; None: any. make_gate: makes what
        decides how many requests may be open. patience_s: seconds before each further try of a
        request that the engine has refused with 503."""
        self._journal = journal
        self._output = output
        self._tally = tally
        self._digest = digest
        self._apis = {
            route: api for route, api in openai_apis(answering).items() if endpoint in (None, route)
        }
        self.view = EngineView(answering.engine)
        self._patience_s = patience_s
        self._gate = make_gate(self.view)
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs: set[Job] = set()
        """Requests that are submitted and not answered yet."""
        self._failure: BaseException | None = None
        """The exception that ended a task, which ends the run."""

    async def run(
        self, entries: AsyncIterable[Entry], *, stop: asyncio.Event, drain_s: float
    ) -> None:
        """Answer every entry. After ``stop`` is set, no request begins, and open ones have
        ``drain_s`` seconds to finish.

        Raises BatchError for an output that cannot be written or an input that cannot be read, and
        EngineDeadError.
        """
        background = [
            asyncio.create_task(self.view.watch(self._gate.changed)),
            asyncio.create_task(self._sync_regularly()),
            asyncio.create_task(self._wake_at(stop)),
        ]
        try:
            await self._feed(entries, stop)
            now = asyncio.get_running_loop().time
            deadline = None
            while self._tasks and self._failure is None and (deadline is None or now() < deadline):
                if stop.is_set() and deadline is None:
                    deadline = now() + drain_s
                await self._changed(deadline)
            if self._failure is not None:
                raise self._failure
        finally:
            for task in (*self._tasks, *background):
                task.cancel()
            await asyncio.gather(*self._tasks, *background, return_exceptions=True)

    def look(self) -> None:
        """Update the tally's count of tokens in open requests."""
        self._tally.open_output_tokens = sum(
            output.num_outputs for job in self._jobs for output in job.outputs
        )

    async def _feed(self, entries: AsyncIterable[Entry], stop: asyncio.Event) -> None:
        async for entry in entries:
            while not self._gate.has_room(entry.num_bytes, held_bytes=self._output.held_bytes):
                await self._changed(None)
                if stop.is_set() or self._failure is not None:
                    return
            if stop.is_set() or self._failure is not None:
                return
            self._output.expect(entry.number)
            if entry.problem is not None:
                self._put(entry, _encode(record.failure_record(self._digest, entry, entry.problem)))
            else:
                self._start(entry)

    def _start(self, entry: Entry) -> None:
        self._gate.opened(1, entry.num_bytes)
        task = asyncio.create_task(self._answer(entry))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._failure is None:
            self._failure = task.exception()
        self._gate.changed.set()

    async def _answer(self, entry: Entry) -> None:
        try:
            self._put(entry, await self._record_of(entry))
        finally:
            self._gate.closed(1, entry.num_bytes)

    async def _record_of(self, entry: Entry) -> EncodedRecord:
        """The record of an entry's answer, or of why it has none. Raises SetpointError if the run
        cannot go on."""
        api = self._apis.get(entry.url)
        if api is None:
            known = ", ".join(self._apis)
            message = f"url must be one of {known}; got {entry.url!r}."
            return _encode(
                record.failure_record(self._digest, entry, Problem("unknown_url", message))
            )
        patience = iter(self._patience_s)
        while True:
            try:
                return await self._answer_record(api, entry)
            except RequestError as error:
                wait_s = next(patience, None) if error.status_code == UNAVAILABLE else None
                if wait_s is None:
                    return self._refusal_record(entry, error.message, status_code=error.status_code)
            except SetpointError:
                raise
            except Exception:
                # As in the server, a bug that one request triggers must not keep the others from
                # their answers.
                logger.exception("An internal error occurred at line %d.", entry.number)
                message = "Internal error; the log has the details."
                return self._refusal_record(entry, message, status_code=500)
            await asyncio.sleep(wait_s)

    def _refusal_record(self, entry: Entry, message: str, *, status_code: int) -> EncodedRecord:
        return _encode(record.refusal_record(self._digest, entry, message, status_code=status_code))

    async def _answer_record(self, api: Api, entry: Entry) -> EncodedRecord:
        """The record of the reply to an entry's request. Raises RequestError, EngineDeadError."""
        exchange = await self._open(api, entry)
        num_more = len(exchange.job.outputs) - 1
        self._gate.opened(num_more, 0)
        try:
            with exchange.job:
                self._jobs.add(exchange.job)
                outputs = await exchange.job.wait()
        finally:
            self._jobs.discard(exchange.job)
            self._gate.closed(num_more, 0)

        def encode_reply() -> tuple[EncodedRecord, dict[str, int]]:
            reply = exchange.reply(outputs)
            return _encode(record.answer_record(self._digest, entry, reply)), reply.get(
                "usage"
            ) or {}

        num_numbers = sum(output.num_numbers for output in outputs)
        if num_numbers <= LONG_NUMBERS:
            encoded, usage = encode_reply()
        else:
            encoded, usage = await asyncio.to_thread(encode_reply)
        # The second names are those of /v1/responses.
        self._tally.prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self._tally.output_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
        return encoded

    async def _open(self, api: Api, entry: Entry) -> Exchange:
        """The entry's request, not submitted yet. Raises RequestError."""
        assert entry.body is not None
        # The id has the line number, so that the engine's log names the line, also after a crash.
        body = {"rid": record.record_id(self._digest, entry.number), **entry.body}

        async def open_exchange() -> Exchange:
            return await api.open(body)

        if entry.num_bytes <= LONG_BYTES:
            exchange = await open_exchange()
        else:
            exchange = await asyncio.to_thread(lambda: asyncio.run(open_exchange()))
        if exchange.is_stream:
            raise RequestError(
                "stream must not be true in a batch, which writes only complete answers."
            )
        return exchange

    def _put(self, entry: Entry, encoded: EncodedRecord) -> None:
        data, error = encoded
        self._output.put(entry.number, data)
        self._tally.count(error)

    async def _changed(self, deadline: float | None) -> None:
        """Wait until something happens that may make room or end the run, or until the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._gate.changed.wait()
        except TimeoutError:
            return
        self._gate.changed.clear()

    async def _wake_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._gate.changed.set()

    async def _sync_regularly(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            try:
                await asyncio.to_thread(self._journal.sync)
            except BatchError as error:
                self._failure = error
                self._gate.changed.set()
                return


def _encode(answer: record.OutputRecord) -> EncodedRecord:
    return record.encode(answer), answer.error
