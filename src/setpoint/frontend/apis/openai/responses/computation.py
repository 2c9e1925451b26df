"""Computes one response in the background, and passes its tokens and its end to the book and the
store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from setpoint.core.messages import Finish
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.openai.responses.script import Making, Script
from setpoint.frontend.jobs import Job, Piece, SequenceOutput
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.storage.background import BackgroundResponse
from setpoint.frontend.storage.responses import KeptResponse, ResponseStore

AT_ONCE = 64
"""Number of tokens that are converted to events before the event loop gets its turn; this takes
about a millisecond."""


class ResponseComputation:
    def __init__(
        self, answering: Answering, response: BackgroundResponse, making: Making, job: Job
    ) -> None:
        """job: a job that continues after the tokens that the response has."""
        self.response = response
        self._drain = answering.jobs.drain
        self._store = answering.responses
        self._book = self._store.background
        self._head = making.head
        self._script = Script(making, response.stored.asked.request, answering.text.known_tokenizer)
        self._job = job
        self._unread = response.ids.tolist()
        """Tokens from earlier servers that the script has not got yet."""
        self._is_begun = False
        """Whether the response has got a token from this server."""
        self.was_submitted = False

    @property
    def _output(self) -> SequenceOutput:
        output = self._job.outputs[0]
        num_cached = self.response.stored.num_cached
        if num_cached is not None:
            output.num_cached = num_cached  # the count of the first server, as if none had ended
        return output

    async def run(self) -> bool:
        """Compute the response to its end. Returns False if it was aborted because the server is
        ending and a later server can continue it. Raises like ``Job.pieces``."""
        while len(self._unread):
            group = self._unread[:AT_ONCE]
            del self._unread[:AT_ONCE]
            self._script.feed(group)
            await asyncio.sleep(0)
        with self._job:
            self.was_submitted = True
            async for pieces in self._job.pieces():
                for piece in pieces:
                    finish = piece.output.finish
                    if finish is None:
                        self._add(piece)
                    elif finish.type == "abort" and self.goes_on_elsewhere:
                        return False
                    else:
                        self._complete(piece.ids, finish)
        return True

    def cancelled(self) -> None:
        """Store the tokens so far as a cancelled response."""
        self._script.end(self._unread, None)
        self._end(self._head.cancelled(self._output, self._script.items), None)

    def failed(self, refusal: Refusal) -> None:
        """Store the tokens so far as a failed response."""
        self._script.end(self._unread, None)
        self._end(self._head.failed(refusal, self._script.items), None)

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether the server is ending and a later server will continue the response."""
        return self._drain.is_on and self._book.is_stored

    def _add(self, piece: Piece) -> None:
        if not piece.num_ids:
            return
        if not self._is_begun:
            self._is_begun = True
            self.response.change(
                response=self._head.begun("in_progress"),
                num_tries=0,
                num_cached=self._output.num_cached,
            )
            keep(self._store, self.response)
        self._script.feed(piece.ids)
        self._book.add_ids(self.response, piece.ids)

    def _complete(self, ids: Sequence[int], finish: Finish) -> None:
        self.response.ids.extend(ids)
        self._script.end(ids, finish)
        self._end(self._head.ended(self._output, self._script.items), finish)

    def _end(self, whole: dict[str, Any], finish: Finish | None) -> None:
        response = self.response
        response.change(response=whole, finish=finish, output_ids=response.ids.tobytes())
        keep(self._store, response)
        self._book.write(response)


def keep(store: ResponseStore, response: BackgroundResponse) -> None:
    """Put the current state of a response into the store, unless it was deleted."""
    if response.id in store.background.responses:
        stored = response.stored
        store.put(
            KeptResponse(
                response=stored.response,
                inputs=stored.asked.inputs,
                earlier=stored.asked.earlier,
                background=response,
            )
        )
