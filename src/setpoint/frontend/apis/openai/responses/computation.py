"""One response in the background while this server computes it: from its job to what the book
stores and the store keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from setpoint.core.messages import Finish
from setpoint.frontend.apis.openai.responses.script import Making, Script
from setpoint.frontend.jobs import Job, Piece, SequenceOutput
from setpoint.frontend.refusal import Refusal
from setpoint.frontend.service import Service
from setpoint.frontend.storage.background import BackgroundResponse
from setpoint.frontend.storage.responses import KeptResponse

AT_ONCE = 64
"""Tokens that are made into events before the event loop gets its turn: about a millisecond."""


class Computation:
    def __init__(
        self, service: Service, response: BackgroundResponse, making: Making, job: Job
    ) -> None:
        """job: goes on behind the tokens that the response has."""
        self.response = response
        self._service = service
        self._book = service.background
        self._head = making.head
        self._script = Script(making, response.stored.asked.request, service.text.known_tokenizer)
        self._job = job
        self._unread = response.ids.tolist()
        """The tokens of earlier servers that the script has not got yet."""
        self._is_begun = False
        """Whether it has got a token from this server."""
        self.was_submitted = False

    @property
    def _output(self) -> SequenceOutput:
        output = self._job.outputs[0]
        num_cached = self.response.stored.num_cached
        if num_cached is not None:
            output.num_cached = num_cached  # as if no server had ended
        return output

    async def run(self) -> bool:
        """Compute the response to its end. Returns False if the engine has aborted it because the
        server ends, and another one can go on. Raises like ``Job.pieces``."""
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
        """Keep what there is as a cancelled response."""
        self._script.end(self._unread, None)
        self._end(self._head.cancelled(self._output, self._script.items), None)

    def failed(self, refusal: Refusal) -> None:
        """Keep what there is as a failed response."""
        self._script.end(self._unread, None)
        self._end(self._head.failed(refusal, self._script.items), None)

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether the server ends, and a later one goes on with the response."""
        return self._service.drain.is_on and self._book.is_stored

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
            keep(self._service, self.response)
        self._script.feed(piece.ids)
        self._book.add_ids(self.response, piece.ids)

    def _complete(self, ids: Sequence[int], finish: Finish) -> None:
        self.response.ids.extend(ids)
        self._script.end(ids, finish)
        self._end(self._head.ended(self._output, self._script.items), finish)

    def _end(self, whole: dict[str, Any], finish: Finish | None) -> None:
        response = self.response
        response.change(response=whole, finish=finish, output_ids=response.ids.tobytes())
        keep(self._service, response)
        self._book.write(response)


def keep(service: Service, response: BackgroundResponse) -> None:
    """Have the store keep the present state of a response, unless it was deleted."""
    if response.id in service.background.responses:
        stored = response.stored
        service.responses.put(
            KeptResponse(
                response=stored.response,
                inputs=stored.asked.inputs,
                earlier=stored.asked.earlier,
                background=response,
            )
        )
