"""Batches of small requests, run against the application in process, for the tests of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from setpoint.batch.entry import Entry
from setpoint.batch.journal import Journal
from setpoint.batch.jsonl import JsonlSource
from setpoint.batch.output import AsTheyCome, InOrder
from setpoint.batch.reading import read_at_once
from setpoint.batch.run import BatchRun
from setpoint.batch.tally import Tally

DRAIN_S = 20.0


def line(number: int, **changes: Any) -> dict[str, Any]:
    body = {"prompt": f"p{number}", "max_tokens": 1 + number % 7}
    return {
        "custom_id": f"id-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": body,
    } | changes


def write(folder: Path, lines: list[Any]) -> Path:
    path = folder / "in.jsonl"
    path.write_text(
        "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines)
    )
    return folder / "out.jsonl"


class Clock:
    """Unix time as a test sets it."""

    def __init__(self) -> None:
        self.at = 1_000_000.0

    def __call__(self) -> float:
        return self.at


class Batch:
    """One run of a batch over ``in.jsonl``, beside ``out``, on a server of the ``serve``
    fixture."""

    def __init__(self, server: Any, out: Path, *, keep_order: bool = False) -> None:
        self._out = out
        self._keep_order = keep_order
        self._answering = server.service.answering
        self.stop = asyncio.Event()
        self.num_read = 0
        self.run_: BatchRun | None = None
        self.tally: Tally | None = None

    async def run(self) -> Tally:
        with (
            closing(JsonlSource(self._out.with_name("in.jsonl"))) as source,
            Journal(self._out) as journal,
        ):
            survey = source.survey()
            self.tally = tally = Tally(survey.num_requests)
            done = journal.recover(survey, tally, in_order=self._keep_order)
            output = InOrder(journal, after=done.last) if self._keep_order else AsTheyCome(journal)
            self.run_ = BatchRun(self._answering, journal, output, tally, digest=survey.digest)
            await self.run_.run(
                read_at_once(self._counted(source.entries(survey, done))),
                stop=self.stop,
                drain_s=DRAIN_S,
            )
        return tally

    def _counted(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        for entry in entries:
            self.num_read += 1
            yield entry


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in out.read_bytes().splitlines()]


def ids(out: Path) -> list[str]:
    return [record["custom_id"] for record in records(out)]
