"""``--export-metrics-to-file``: a line of JSON for each sequence that ends, in a file per hour. No
line holds text or token ids."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import msgspec

from setpoint.frontend.telemetry.book import RequestBook
from setpoint.frontend.telemetry.measured_sequence import MeasuredSequence
from setpoint.frontend.telemetry.request_log import summary

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Most lines that wait for a slow disk; further ones are lost and counted."""

CONTENTS = (
    *("stop", "stop_token_ids", "stop_regex", "logit_bias"),
    *("json_schema", "regex", "ebnf", "structural_tag"),
)
"""The sampling parameters that may hold a client's text or tokens, which no line contains."""


class RequestExport:
    """Lines are written by a thread of its own, so that a slow disk holds up nobody. The end of the
    process waits for them."""

    def __init__(
        self, folder: Path, book: RequestBook, *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """folder: exists. book: counts the lines that could not be written."""
        self._folder = folder
        self._book = book
        self._now = now
        self._num_waiting = 0
        self._failing = False
        """Whether the last line could not be written; a change is logged once."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="request-export")

    def finished(self, output: MeasuredSequence) -> None:
        request = output.request
        parameters = {
            "rid": request.rid,
            "sampling_params": {
                name: value
                for name, value in msgspec.to_builtins(request.sampling).items()
                if name not in CONTENTS
            },
            "stream": request.options.stream,
            "return_logprob": request.options.logprobs is not None,
            "priority": request.options.priority,
        }
        line = {
            "request_parameters": json.dumps(parameters),
            **summary(output),
        }
        if self._num_waiting >= MAX_WAITING:
            self._book.lost_exports += 1
            return
        self._num_waiting += 1
        self._thread.submit(self._write, self._now(), json.dumps(line))

    def _write(self, at: datetime, line: str) -> None:
        path = self._folder / f"sglang-request-metrics-{at:%Y%m%d_%H}.log"
        try:
            with path.open("a", encoding="ascii") as file:
                file.write(f"{line}\n")
        except OSError as error:
            self._book.lost_exports += 1
            if not self._failing:
                logger.error("Cannot write %s: %s. Lines are lost.", path, error.strerror)
            self._failing = True
        else:
            if self._failing:
                logger.warning("%s can be written again.", path)
            self._failing = False
        finally:
            self._num_waiting -= 1
