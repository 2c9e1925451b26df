"""Which chunks of a stream leave in one write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from setpoint.core.messages import Finish, Ready, TokenEvent, Tokens
from setpoint.core.request import Request, pack_ids
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.http.sse import EventStream, event
from setpoint.frontend.jobs import Job
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine
from setpoint_testing.byte_tokenizer import make_byte_tokenizer
from setpoint_testing.fake_engine import SOME_FACTS, FakeEngine


def test_events_that_are_here_leave_together_and_none_waits_for_the_next() -> None:
    async def scenario() -> list[bytes]:
        engine = FakeEngine(silent=True)
        client = EngineClient()
        client.attach(EngineLine(engine))
        engine.emit(Ready(SOME_FACTS))
        request = Request(rid="a", prompt_ids=pack_ids([1]), sampling=SamplingParams(), seed=0)
        job = Job(
            client, Tokenizer(make_byte_tokenizer()), [request], on_finish=lambda output: None
        )

        async def chunks() -> AsyncGenerator[bytes, None]:
            async for pieces in job.pieces():
                for piece in pieces:
                    yield piece.text.encode()

        written: list[bytes] = []
        num_outputs = 0

        async def send(message: Any) -> None:
            written.append(message.get("body", b"head"))

        def emit(token: int, finish: Finish | None = None) -> None:
            nonlocal num_outputs
            num_outputs += 1
            engine.emit(Tokens([TokenEvent(0, [token], finish, num_outputs=num_outputs)]))

        async def until(count: int) -> None:
            while len(written) < count:
                await asyncio.sleep(0)

        stream = EventStream(job, chunks(), lambda refusal: b".")
        answering = asyncio.create_task(stream({"type": "http"}, asyncio.Event().wait, send))  # type: ignore[arg-type]
        while not client.num_open:
            await asyncio.sleep(0)
        emit(65)
        await until(2)  # with no other event to come
        for token in (66, 67, 68):
            emit(token)
        await until(3)
        emit(69)
        emit(70, Finish("length"))
        await answering
        return written

    assert asyncio.run(scenario()) == [b"head", b"A", b"BCD", b"EF."]


def test_an_event_is_one_line_for_everybody() -> None:
    """Red before: httpx's iter_lines, which uses str.splitlines, cut an event in two."""
    text = "".join(map(chr, range(0x3000)))
    (line,) = event({"text": text}).decode().removesuffix("\n\n").splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
