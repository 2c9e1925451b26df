"""Ten million lines from one end to the other: memory stays where it was, less the eight bytes per
line of the search for duplicates."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from setpoint.batch.journal import Journal
from setpoint.batch.jsonl import JsonlSource
from setpoint.batch.output import AsTheyCome
from setpoint.batch.reading import read_at_once
from setpoint.batch.run import BatchRun
from setpoint.batch.tally import Tally

MIB = 1 << 20
NUM_LINES = 10_000_000
GOOD_EVERY = 2_000
"""The other lines are failures of their own, which cost no engine: they pass through everything but
that."""


@contextmanager
def peak_bytes() -> Iterator[Callable[[], int]]:
    """How far resident memory has been above where it was."""
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: peak - before
    finally:
        done.set()
        thread.join()


def write_lines(path: Path) -> None:
    with path.open("w") as file:
        for number in range(NUM_LINES):
            if number % GOOD_EVERY:
                file.write(f'{{"custom_id":"id-{number}"}}\n')
            else:
                body = {"prompt": "x" * 50, "max_tokens": 2}
                file.write(
                    json.dumps(
                        {
                            "custom_id": f"id-{number}",
                            "method": "POST",
                            "url": "/v1/completions",
                            "body": body,
                        }
                    )
                    + "\n"
                )


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_ten_million_lines_in_constant_memory(serve: Callable[..., None], tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl")

    async def scenario(server: Any) -> None:
        with (
            closing(JsonlSource(tmp_path / "in.jsonl")) as source,
            Journal(tmp_path / "out.jsonl") as journal,
        ):
            with peak_bytes() as peak:
                survey = source.survey()
                assert survey.num_requests == NUM_LINES
                assert peak() < 8 * NUM_LINES + 64 * MIB
            with peak_bytes() as peak:
                tally = Tally(survey.num_requests)
                done = journal.recover(survey, tally, in_order=False)
                run = BatchRun(
                    server.service.answering,
                    journal,
                    AsTheyCome(journal),
                    tally,
                    digest=survey.digest,
                )
                server.engine.submitted = _Forgets()
                entries = read_at_once(source.entries(survey, done))
                await run.run(entries, stop=asyncio.Event(), drain_s=0)
                assert tally.num_done == NUM_LINES
                assert tally.num_failed == NUM_LINES - NUM_LINES // GOOD_EVERY
                assert peak() < 64 * MIB
        with Journal(tmp_path / "out.jsonl") as journal, peak_bytes() as peak:
            tally = Tally(survey.num_requests)
            journal.recover(survey, tally, in_order=False)
            assert tally.num_before == NUM_LINES
            assert peak() < 32 * MIB

    try:
        serve(scenario)
    finally:
        (tmp_path / "out.jsonl").unlink(
            missing_ok=True
        )  # two gigabytes, which a failed test would keep
        (tmp_path / "in.jsonl").unlink()


class _Forgets(list[Any]):
    """The fake engine's record of what it was asked, which would grow with the file."""

    def append(self, item: Any) -> None:
        pass
