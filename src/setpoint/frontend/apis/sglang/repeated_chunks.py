"""Makes the chunks of a stream of ``/generate``, each of which has the whole answer so far
(docs/decisions/0085-chunks-that-repeat.md).

A chunk after each of n tokens makes n² entries. So what is repeated is encoded once and copied, and
all such streams together copy a limited number of bytes per second. While a stream waits for its
share, or for its client, its tokens gather, and the next chunk has them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from setpoint.core.errors import SetpointError
from setpoint.core.logprobs import LogprobBlock
from setpoint.frontend.apis.sglang.native import NativeApi, PreparedRequest
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.sse import LONG_WRITE, event
from setpoint.frontend.jobs import ClientGoneError, Job, Piece, SequenceOutput

RATE = 32 << 20
"""Bytes of chunks per second of all streams together: a few percent of a core."""
FREE_BYTES = 1 << 16
"""Bytes that a stream may send ahead of its share, so that short answers come token by token."""

_encode = msgspec.json.Encoder().encode


class RepeatRate:
    """Divides ``RATE`` evenly among the open streams."""

    def __init__(self) -> None:
        self.num_streams = 0

    def join(self) -> Spacing:
        self.num_streams += 1
        return Spacing(self)


class Spacing:
    """When one stream may send its next chunk, in seconds of the event loop."""

    def __init__(self, rate: RepeatRate) -> None:
        self._rate = rate
        self._paid_until = 0.0

    def leave(self) -> None:
        self._rate.num_streams -= 1

    def spend(self, num_bytes: int, now: float) -> None:
        """Note a chunk that was sent."""
        self._paid_until = max(self._paid_until, now) + num_bytes / self._bytes_per_s

    @property
    def next_at(self) -> float:
        return self._paid_until - FREE_BYTES / self._bytes_per_s

    @property
    def _bytes_per_s(self) -> float:
        return RATE / self._rate.num_streams


class Grown:
    """What one sequence's chunks repeat, as JSON that grows: the text, the ids, and the lists with
    an entry for each token."""

    def __init__(self) -> None:
        self._text = bytearray(b'"')
        self._lists = {"output_ids": bytearray(b"[")}
        self.lengths: dict[str, int] = {}
        """Name -> number of entries."""
        self.prompt: dict[str, Any] | None = None
        """The fields about the prompt, encoded; made once its logprobs are known."""

    def add(self, text: str, lists: Mapping[str, Sequence[Any]]) -> None:
        self._text += _encode(text)[1:-1]
        for name, entries in lists.items():
            length = self.lengths.get(name, 0)
            self.lengths[name] = length + len(entries)
            data = self._lists.setdefault(name, bytearray(b"["))
            if entries:
                data += (b"," if length else b"") + _encode(entries)[1:-1]

    @property
    def text(self) -> msgspec.Raw:
        return msgspec.Raw(self._text + b'"')

    def lists(self) -> dict[str, msgspec.Raw]:
        return {name: msgspec.Raw(data + b"]") for name, data in self._lists.items()}

    def clear(self) -> None:
        prompt = self.prompt
        self.__init__()  # type: ignore[misc]
        self.prompt = prompt


class RepeatedChunks:
    """Makes the chunks of one request."""

    def __init__(
        self,
        api: NativeApi,
        bodies: BodyReader,
        prepared: PreparedRequest,
        rate: RepeatRate,
        *,
        incremental: bool,
    ) -> None:
        """incremental: whether a chunk has only what is new (--incremental-streaming-output); of
        the prompt's logprobs it still has all."""
        self._api = api
        self._bodies = bodies
        self._prepared = prepared
        self._rate = rate
        self._incremental = incremental
        self._grown: dict[int, Grown] = {}
        self._prompts: dict[int, LogprobBlock | None] = {}
        """Index of a sequence -> the logprobs from which the fields about its prompt were made."""
        self._unsent: dict[int, SequenceOutput] = {}
        """The sequences with something new, by index; the one that has waited longest first."""

    async def stream(self, job: Job) -> AsyncGenerator[bytes, None]:
        """Raises like ``Job.pieces``."""
        spacing = self._rate.join()
        now = asyncio.get_running_loop().time
        try:
            async for pieces in job.pieces():
                for piece in pieces:
                    await self._take(piece)
                num_bytes = 0
                while num_bytes < LONG_WRITE:
                    output = self._next(is_due=now() >= spacing.next_at)
                    if output is None:
                        break
                    chunk = self._chunk(output)
                    spacing.spend(len(chunk), now())
                    num_bytes += len(chunk)
                    yield chunk
                job.not_before = self._not_before(spacing)
            while self._unsent:
                yield self._chunk(next(iter(self._unsent.values())))
                await job.before_wait()
        except ClientGoneError:
            raise
        except SetpointError:
            while self._unsent:  # what came before the error
                yield self._chunk(next(iter(self._unsent.values())))
            raise
        finally:
            spacing.leave()

    def _next(self, *, is_due: bool) -> SequenceOutput | None:
        """The sequence whose chunk is to be sent now: the last chunk of one waits for nothing."""
        outputs = self._unsent.values()
        ended = next((each for each in outputs if each.finish is not None), None)
        return ended or (next(iter(outputs), None) if is_due else None)

    def _not_before(self, spacing: Spacing) -> float | None:
        if not self._unsent:
            return None
        has_ended = any(each.finish is not None for each in self._unsent.values())
        return 0.0 if has_ended else spacing.next_at

    async def _take(self, piece: Piece) -> None:
        output = piece.output
        grown = self._grown.setdefault(output.index, Grown())
        lists = partial(self._api.output_lists, output, self._prepared, piece.num_ids)
        await self._bodies.beside(
            piece.num_numbers, lambda: grown.add(piece.text, {"output_ids": piece.ids, **lists()})
        )
        if grown.prompt is None or self._prompts.get(output.index) is not output.prompt_logprobs:
            self._prompts[output.index] = output.prompt_logprobs
            fields = await self._bodies.beside(
                output.num_prompt_numbers,
                lambda: {
                    name: msgspec.Raw(_encode(value))
                    for name, value in self._api.prompt_fields(output, self._prepared).items()
                },
            )
            grown.prompt = fields
        self._unsent.setdefault(output.index, output)

    def _chunk(self, output: SequenceOutput) -> bytes:
        del self._unsent[output.index]
        grown = self._grown[output.index]
        assert grown.prompt is not None
        result = self._api.answer(
            output,
            self._prepared,
            text=grown.text,
            lists=grown.lists(),
            lengths=grown.lengths,
            prompt=grown.prompt,
        )
        if self._incremental:
            grown.clear()
        if self._prepared.is_list:
            result["index"] = output.index
        return event(result)
