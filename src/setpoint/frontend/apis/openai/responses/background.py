"""Runs responses in the background to their end, from the beginning or from where an earlier server
stopped, and makes their events for clients that follow them (decision 0057)."""

from __future__ import annotations

import asyncio
import logging
from asyncio import CancelledError, Event, Task
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

from setpoint.core.errors import EngineDeadError, RequestError, SetpointError, reason_of
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.openai.responses.api import ResponseExchange, ResponsesApi
from setpoint.frontend.apis.openai.responses.computation import AT_ONCE, ResponseComputation, keep
from setpoint.frontend.apis.openai.responses.reply import ResponseHead
from setpoint.frontend.apis.openai.responses.script import Making, Script
from setpoint.frontend.drain import CUT, REFUSED
from setpoint.frontend.http.sse import named_event
from setpoint.frontend.refusal import RETRY_AFTER_S, Refusal, refusal_of
from setpoint.frontend.storage.background import BackgroundResponse, ResponseInputs, StoredResponse
from setpoint.frontend.storage.documents import cannot_store

logger = logging.getLogger(__name__)

MAX_RUNNING = 1000
"""Maximum number of responses that run in the background at once."""
MOST_TRIES = 3
"""A response has failed when this many servers in turn have ended unexpectedly without computing a
new token of it."""
SUSPECT_TRIES = 2
"""After this many such ends, the next server tries the response before the other unfinished
ones."""


class Background:
    def __init__(self, answering: Answering, api: ResponsesApi) -> None:
        self._answering = answering
        self._api = api
        self._store = answering.responses
        self._book = self._store.background
        self._running: set[str] = set()
        """Ids of the responses that have begun and not ended."""
        self._tasks: set[Task[None]] = set()
        self._is_ending = False
        self._have_tasks = Event()
        """Set when every unfinished response of an earlier server is running or waits for its
        turn."""
        for response in list(self._book.responses.values()):
            keep(self._store, response)
        self._left = self._book.unfinished()
        """The unfinished responses of earlier servers."""
        if not self._left:
            self._have_tasks.set()

    async def begin(self, exchange: ResponseExchange) -> BackgroundResponse:
        """Store a new response and begin to compute it. Raises RequestError: 429 if too many are
        running, 503 if the server is ending, 507 if it cannot be stored."""
        if self._is_ending:
            raise RequestError(REFUSED, status_code=503, retry_after_s=RETRY_AFTER_S)
        if len(self._running) >= MAX_RUNNING:
            raise RequestError(
                f"{MAX_RUNNING} responses already run in the background, the limit of this server;"
                " retry later.",
                status_code=429,
            )
        head, config = exchange.making.head, self._answering.config
        asked = ResponseInputs(
            body=exchange.raw,
            request=exchange.job.outputs[0].request,
            model=self._model,
            tokenizer=config.tokenizer_path,
            inputs=[dict(item) for item in exchange.inputs],
            earlier=[dict(item) for item in exchange.earlier],
        )
        stored = StoredResponse(id=head.id, asked=asked, response=head.begun("queued"))
        response = BackgroundResponse(stored)
        self._running.add(response.id)
        try:
            await self._book.add(response)
        except RequestError:
            self._running.discard(response.id)
            raise
        keep(self._store, response)
        computation = ResponseComputation(self._answering, response, exchange.making, exchange.job)
        self._start(response, self._compute(computation))
        return response

    async def cancel(self, response: BackgroundResponse) -> None:
        """End a response, if it has not ended. Raises RequestError (507) if its end cannot be
        stored."""
        await self._stop(response)
        if response.is_cancelled and not response.is_saved and not response.interruption:
            raise cannot_store(
                "the cancelled response is only in memory, and the server tries again to store it"
            )

    async def delete(self, response: BackgroundResponse) -> None:
        """Remove a response for good. Raises RequestError (507)."""
        self._book.forget(response.id)
        response.interruption = "The response was deleted."
        await self._stop(response)
        await self._book.save()

    async def _stop(self, response: BackgroundResponse) -> None:
        await self._have_tasks.wait()
        await asyncio.sleep(0)  # a task that is cancelled before its first step stores nothing
        if response.task is not None and not response.task.done():
            response.is_cancelled = True
            response.task.cancel()
            await asyncio.wait([response.task])
        response.wake()

    async def follow(
        self, response: BackgroundResponse, *, after: int, making: Making | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yields the events with a number above ``after``: first the past ones, then each new one
        as it comes. making: the response's Making, if the caller has it. Raises RequestError (400)
        if this server cannot make the events."""
        asked = response.stored.asked
        self._check_tokenizer(asked)
        if making is None:
            making = await self._api.again(asked, response.stored.response)
        script = Script(making, asked.request, self._answering.text.known_tokenizer)
        return self._events(response, script, after)

    async def _events(
        self, response: BackgroundResponse, script: Script, after: int
    ) -> AsyncGenerator[bytes, None]:
        last = after
        for event in (first := script.begin()):
            last = max(last, event["sequence_number"])
        yield _encoded(first, after)
        at = 0
        while True:
            has_ended, num_shown = response.has_ended, response.num_shown
            while num_shown - at > AT_ONCE or (not has_ended and num_shown > at):
                group = response.ids[at : min(at + AT_ONCE, num_shown)].tolist()
                at += len(group)
                events = script.feed(group)
                last = max([last, *(event["sequence_number"] for event in events)])
                yield _encoded(events, after)
                await asyncio.sleep(0)
            if has_ended:
                stored = response.stored
                events = script.end(response.ids[at:].tolist(), stored.finish)
                yield _encoded([*events, *script.last(stored.response)], after)
                return
            if response.interruption:
                yield _interruption_event(response.interruption, last)
                return
            if (response.has_ended, response.num_shown) == (has_ended, num_shown):
                await response.wait_until_shown()

    async def run(self) -> None:
        """Continue the unfinished responses of an earlier server. When cancelled, leave running
        responses to a later server."""
        try:
            await self._resume()
            await Event().wait()
        finally:
            self._is_ending = True
            if self._book.is_stored:
                await self._leave()

    async def _resume(self) -> None:
        turns: dict[BackgroundResponse, Event] = {}
        for response in self._left:
            computation = await self._again(response)
            if computation is not None:
                turn = turns[response] = Event()
                self._start(response, self._compute(computation, turn))
        self._have_tasks.set()
        if turns:
            logger.info("%s where an earlier server has stopped.", _go_on(len(turns)))
        # One after the other, and the most suspicious first: a response that does not end this
        # server did not end the earlier ones either.
        suspects = [each for each in turns if each.stored.num_tries >= SUSPECT_TRIES]
        for response in sorted(suspects, key=lambda each: -each.stored.num_tries):
            num_shown = response.num_shown
            await self._count_try([response])
            turns[response].set()
            while response.task in self._tasks and response.num_shown == num_shown:
                await response.wait_until_shown()
        others = [each for each in turns if each not in suspects]
        await self._count_try(others)
        for response in others:
            turns[response].set()

    async def _count_try(self, responses: Sequence[BackgroundResponse]) -> None:
        for response in responses:
            response.change(num_tries=response.stored.num_tries + 1)
        with suppress(RequestError):  # the book has logged the error and tries again
            await self._book.save(*responses)

    async def _leave(self) -> None:
        """Stop running responses so that a later server can continue them."""
        left = [each for each in self._book.unfinished() if each.task in self._tasks]
        for response in left:
            assert response.task is not None
            response.task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        with suppress(RequestError):
            await self._book.save(*left)
        if left:
            logger.info(
                "%s when a server with this --file-storage-path starts again.", _go_on(len(left))
            )

    def _start(self, response: BackgroundResponse, work: Coroutine[Any, Any, None]) -> None:
        task = response.task = asyncio.create_task(work, name=response.id)
        self._tasks.add(task)
        self._running.add(response.id)

        def done(task: Task[None]) -> None:
            self._tasks.discard(task)
            self._running.discard(response.id)
            response.wake()
            if not response.interruption:
                logger.info(
                    "Response %s in the background has ended: %s, output %d",
                    response.id,
                    response.stored.response["status"],
                    len(response.ids),
                )

        task.add_done_callback(done)

    async def _again(self, response: BackgroundResponse) -> ResponseComputation | None:
        """The ResponseComputation that continues a response of an earlier server; None if that is
        impossible and the response has failed."""
        asked = response.stored.asked
        try:
            self._check_tokenizer(asked)
            making = await self._api.again(asked, response.stored.response)
            job = self._api.job_again(asked, making, response.ids.tobytes())
        except Exception as error:  # a damaged response must not keep the others from continuing
            is_known = isinstance(error, RequestError)
            logger.error(
                "%s has failed, because it cannot be continued: %s",
                response.id,
                error,
                exc_info=None if is_known else error,
            )
            head = ResponseHead.again(response.stored.response, reasoning_tokens=lambda output: 0)
            why = error if is_known else "an internal error; the server's log has the details."
            refusal = Refusal(message=f"The response cannot be continued: {why}", status_code=500)
            ids = response.ids.tobytes()
            response.change(response=head.failed(refusal, []), output_ids=ids)
            keep(self._store, response)
            self._book.write(response)
            return None
        return ResponseComputation(self._answering, response, making, job)

    async def _compute(self, computation: ResponseComputation, turn: Event | None = None) -> None:
        """Compute a response to its end. turn: for a response of an earlier server, set when it may
        begin."""
        response = computation.response
        try:
            if turn is not None:
                await turn.wait()
                self._check_again(response)
            if not await computation.run():
                self._interrupt(response, CUT)
        except CancelledError:
            if response.is_cancelled:
                computation.cancelled()
                with suppress(RequestError):  # ``cancel`` tells the client
                    await self._book.save(response)
                return
            self._interrupt(response, CUT)
            if computation.was_submitted and response.stored.num_tries:
                response.change(num_tries=0)  # this server has been asked to end
        except SetpointError as error:
            is_gone = isinstance(error, EngineDeadError) and self._book.is_stored
            if is_gone or computation.goes_on_elsewhere:
                self._interrupt(response, reason_of(error))
            else:
                computation.failed(refusal_of(error))
        except Exception:
            logger.exception("An internal error ended a response in the background.")
            message = "Internal server error; the server's log has the details."
            computation.failed(Refusal(message=message, status_code=500))

    def _check_again(self, response: BackgroundResponse) -> None:
        """Raise RequestError for a response of an earlier server that must not be continued."""
        asked, num_tries = response.stored.asked, response.stored.num_tries - 1
        if asked.model != self._model:
            raise RequestError(
                f"The response was begun with the weights {asked.model}, but this server has"
                f" {self._model}.",
                status_code=500,
            )
        if num_tries >= MOST_TRIES:
            logger.error(
                "%s is not tried again: %d servers in turn ended while they computed it.",
                response.id,
                num_tries,
            )
            raise RequestError(
                f"The response is not tried again, because {num_tries} servers in turn ended"
                " while they computed it, without a new token.",
                status_code=500,
            )

    def _check_tokenizer(self, asked: ResponseInputs) -> None:
        if asked.tokenizer != self._answering.config.tokenizer_path:
            raise RequestError(
                f"The response was begun with the tokenizer {asked.tokenizer}, but this server"
                f" has {self._answering.config.tokenizer_path}."
            )

    def _interrupt(self, response: BackgroundResponse, why: str) -> None:
        response.interruption = (
            f"{why.rstrip('.')}. The response continues when the server starts again; get its"
            " further events with stream=true and starting_after."
        )
        response.wake()

    @property
    def _model(self) -> str:
        """This server's description of its weights."""
        weights = self._answering.weights
        return f"{weights.model_path} ({weights.version})"


def _go_on(count: int) -> str:
    if count == 1:
        return "1 response in the background goes on"
    return f"{count} responses in the background go on"


def _encoded(events: Iterable[dict[str, Any]], after: int) -> bytes:
    return b"".join(
        named_event(event["type"], event) for event in events if event["sequence_number"] > after
    )


def _interruption_event(why: str, last: int) -> bytes:
    """The event that says why the stream ends here. It has the number of the event before it,
    because it is not an event of the response."""
    return named_event(
        "error",
        {
            "type": "error",
            "code": "server_error",
            "message": why,
            "param": None,
            "sequence_number": last,
        },
    )
