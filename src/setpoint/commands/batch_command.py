"""``setpoint batch``: runs a batch with its files and an engine, then prints a summary and returns
an exit code.

Exit codes: 0: every request was answered; 3: the batch is complete, but some requests failed; 1:
the batch ended early with an error; 130: a signal ended it early. After 1 or 130, the same command
continues the batch.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Set
from contextlib import closing
from pathlib import Path
from typing import Any

from setpoint.batch import parquet, parquet_output
from setpoint.batch.batch_progress import EVERY_S, Display, display
from setpoint.batch.entry import BatchError, BatchInput, Entry, Survey
from setpoint.batch.journal import Journal
from setpoint.batch.jsonl import JsonlSource
from setpoint.batch.output import AsTheyCome, InOrder, Output
from setpoint.batch.reading import read_at_once
from setpoint.batch.run import BatchRun
from setpoint.batch.tally import Tally
from setpoint.config.check import check_has_text
from setpoint.config.command_options import BatchOptions
from setpoint.config.environment import EnvSettings
from setpoint.config.options import Options
from setpoint.core.errors import ConfigError, EngineDeadError
from setpoint.launch.parent.engine import Launched, launch_engine
from setpoint.launch.parent.engine_session import EngineSession
from setpoint.launch.parent.phases import Phases
from setpoint.launch.parent.signals import EndAsked, run_until_asked
from setpoint.observe.logline import setup_logging
from setpoint.observe.progress_display import stderr_lines

DONE, FAILED, INTERRUPTED = 0, 3, 130
DRAIN_S = 10.0
"""Seconds in which open requests may finish after the first signal."""
ENGINE_EXIT_S = 5.0
"""How long the engine may take to end after that."""
END_S = 30.0
"""How long the run may take to end after that. A forced end loses nothing that is in the
journal."""
GO_ON = "Run the same command again to continue."


def run_batch(
    own: BatchOptions, options: Options, env: EnvSettings, *, given: Set[str] = frozenset()
) -> int:
    """Run until every request is answered or a signal ends the run; returns the exit code. Raises
    SetpointError for a batch that cannot continue."""
    if own.input is None or own.output is None:
        raise ConfigError("Name an input and an output: setpoint batch INPUT -o OUTPUT.")
    if "-" in (own.input, own.output):
        raise ConfigError(
            "A batch cannot use '-' for stdin or stdout, because it reads its input twice and reads"
            " its output again. Name files."
        )
    check_has_text(options, "'setpoint batch'")
    setup_logging(options.logs.log_level, milliseconds=env.log_ms)
    source_path, output_path = Path(own.input), Path(own.output)
    is_parquet = parquet.is_parquet(output_path)
    with closing(_source(source_path)) as source:
        if output_path.exists() and os.path.samefile(source_path, output_path):
            raise BatchError(f"{output_path} is the input; name another file with -o.")
        survey = source.survey()
        if not survey.num_requests:
            raise BatchError(f"{source_path} holds no requests.")
        if (
            is_parquet
            and (num_failed := parquet_output.num_failed_of(output_path, survey)) is not None
        ):
            print(
                f"{output_path} is complete: {survey.num_requests} requests, {num_failed} failed."
            )
            return FAILED if num_failed else DONE
        journal_path = parquet_output.journal_of(output_path) if is_parquet else output_path
        with Journal(journal_path) as journal:
            batch = _Batch(source, survey, journal, keep_order=own.keep_order)
            batch.work(options, env, given)
            if is_parquet and not batch.num_left:
                journal.sync()
                parquet_output.write(output_path, journal_path, batch.tally, survey)
    return batch.end(output_path)


def _source(path: Path) -> BatchInput:
    return parquet.ParquetSource(path) if parquet.is_parquet(path) else JsonlSource(path)


class _Batch:
    """One batch: its remaining requests, its answered requests, and how this run ended."""

    def __init__(
        self, source: BatchInput, survey: Survey, journal: Journal, *, keep_order: bool
    ) -> None:
        """Read the journal. Raises BatchError."""
        self.tally = Tally(survey.num_requests)
        done = journal.recover(survey, self.tally, in_order=keep_order)
        self._digest = survey.digest
        self._journal = journal
        self._entries: Iterator[Entry] = source.entries(survey, done)
        self._output: Output = (
            InOrder(journal, after=done.last) if keep_order else AsTheyCome(journal)
        )

    @property
    def num_left(self) -> int:
        return self.tally.num_requests - self.tally.num_done

    def work(self, options: Options, env: EnvSettings, given: Set[str]) -> None:
        """Start an engine and answer the remaining requests until a signal ends the run. On an
        error, print the summary so far and raise SetpointError."""
        if not self.num_left:
            return
        phases = Phases()
        try:
            with (
                display() as bar,
                launch_engine(
                    options,
                    env,
                    given=given,
                    phases=phases,
                    display=stderr_lines(),
                    stderr=bar.engine_stderr,
                ) as engine,
            ):
                run_until_asked(
                    lambda asked: self._work(engine, phases, bar, asked),
                    limit_s=lambda: DRAIN_S + END_S,
                    at_once_s=END_S,
                )
        except (BatchError, EngineDeadError):
            print(f"{self.tally.summary()}\n{GO_ON}")
            raise

    def end(self, output_path: Path) -> int:
        """Print the summary; returns the exit code."""
        print(f"{self.tally.summary()}\nOutput: {output_path}")
        if self.num_left:
            print(GO_ON)
            return INTERRUPTED
        return FAILED if self.tally.num_failed else DONE

    async def _work(self, engine: Launched, phases: Phases, bar: Display, asked: EndAsked) -> None:
        async with EngineSession(engine, phases) as session:
            session.exit_s = ENGINE_EXIT_S
            stopped = asyncio.create_task(asked.end.wait())
            stopped.add_done_callback(_say_that_it_stops)
            services = await session.services_unless(stopped)
            if not services:
                return
            (service,) = services
            run = BatchRun(
                service.answering, self._journal, self._output, self.tally, digest=self._digest
            )
            self.tally.started_at = time.monotonic()
            showing = asyncio.create_task(_show(bar, run, self.tally))
            working = asyncio.create_task(
                run.run(read_at_once(self._entries), stop=asked.end, drain_s=DRAIN_S)
            )
            at_once = asyncio.create_task(asked.at_once.wait())
            await asyncio.wait([working, at_once], return_when=asyncio.FIRST_COMPLETED)
            for task in (showing, at_once, stopped):
                task.cancel()
            if working.done():
                run.look()
                bar.show(self.tally, run.view)
                working.result()
            else:
                working.cancel()
                await asyncio.wait([working])
                session.kill()


def _say_that_it_stops(stopped: asyncio.Task[Any]) -> None:
    if not stopped.cancelled():
        print(
            f"Stopping: open requests have {DRAIN_S:g} s to finish. Interrupt again to stop at"
            " once.",
            file=sys.stderr,
            flush=True,
        )


async def _show(bar: Display, run: BatchRun, tally: Tally) -> None:
    while True:
        run.look()
        bar.show(tally, run.view)
        await asyncio.sleep(EVERY_S)
