"""Passes on what happens to clients' requests: to the book of counts, the table of requests, the
log, and whoever else reads it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from setpoint.core.excerpt import excerpt
from setpoint.frontend.telemetry.book import RequestBook
from setpoint.frontend.telemetry.measured_sequence import MeasuredSequence
from setpoint.frontend.telemetry.request_log import RequestLog
from setpoint.frontend.telemetry.roster import Roster

logger = logging.getLogger(__name__)

Reader = Callable[[MeasuredSequence], None]
"""Is called with every sequence of a client that has ended."""


@dataclass(slots=True, frozen=True)
class RequestEvents:
    book: RequestBook
    log: RequestLog
    readers: Sequence[Reader] = ()
    roster: Roster = field(default_factory=Roster)

    def ended(self, output: MeasuredSequence, *, is_logged: bool) -> None:
        self.roster.ended(output)
        book = self.book
        book.num_sequences += 1
        book.num_aborted += not output.is_complete
        book.prompt_tokens += output.num_prompt
        book.cached_tokens += output.num_cached
        book.output_tokens += output.num_outputs
        if is_logged:
            self.log.finished(output)
        for reader in self.readers:
            try:
                reader(output)
            except Exception:
                logger.exception("Cannot log the end of request %s.", excerpt(output.rid))
