"""Sends the frontend's requests to engines and receives their events; it outlives each engine.

As long as a request is open, it has a number and a name (rid) here, and a line that it was sent on:
one life of an engine (see ``ipc.line``). When that line ends, its requests end with the
reason; the next line attached takes new ones. Nothing here knows of text or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from setpoint.core.errors import EngineDeadError, RequestError
from setpoint.core.messages import Abort, Stop, Submit, TokenEvent
from setpoint.core.request import Request
from setpoint.ipc.line import EngineLine
from setpoint.ipc.mailbox import Mailbox, WakeUps


@dataclass(slots=True, frozen=True)
class _Submission:
    rid: str
    mailbox: Mailbox
    index: int
    """Index of the sequence among the sequences of its mailbox."""
    line: EngineLine


class EngineClient:
    """Contract: every submission ends with a finish event, ``stop`` or a failed mailbox.

    Each submission has a number that is never used again on any line, so a late message for one
    cannot reach another that reuses its rid.
    """

    def __init__(self) -> None:
        self._line: EngineLine | None = None
        self.num_lines = 0
        """How many lines have been attached so far."""
        self._open: dict[int, _Submission] = {}
        self._seq_ids: dict[str, int] = {}
        """rid -> number, for the open submissions."""
        self._next_seq_id = 0
        self._wake_ups = WakeUps()

    def attach(self, line: EngineLine) -> None:
        """Send requests on this line from now on; to be called inside the running loop. An earlier
        line must have ended, and nothing more is received on it."""
        if self._line is not None:
            assert self._line.has_ended, "the line before is still in use"
            self._line.close()
        self._line = line
        self.num_lines += 1
        line.start(self._route, lambda: self._fail(line))

    def close(self) -> None:
        if self._line is not None:
            self._line.close()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_submitted(self) -> int:
        """Requests sent so far."""
        return self._next_seq_id

    @property
    def line(self) -> EngineLine | None:
        """The latest line, which may have ended; None before the first."""
        return self._line

    @property
    def is_ready(self) -> bool:
        """Whether a request would be processed now."""
        return self._line is not None and self._line.is_ready

    def choose(self) -> EngineLine:
        """The line for the next request or call; with several engines, one would be chosen here.
        Raises EngineDeadError if there is none."""
        if self._line is None:
            raise EngineDeadError("There is no engine yet.")
        self._line.check_ready()
        return self._line

    def submit(self, request: Request, mailbox: Mailbox, index: int = 0) -> int:
        """Send a request, whose events go to ``mailbox`` under ``index``. Returns the number with
        which to ``stop`` it. Raises RequestError (400) for a rid in use or a number that no message
        can carry, EngineDeadError without an engine.
        """
        line = self.choose()
        if request.rid in self._seq_ids:
            raise RequestError(
                f"Duplicate request ID {request.rid!r}: a request with this rid is still running."
            )
        seq_id = self._next_seq_id
        try:
            line.send(Submit(seq_id, request))
        except (OverflowError, UnicodeEncodeError) as error:
            raise RequestError(
                f"A value of this request cannot be sent to the engine: {error}."
            ) from None
        self._next_seq_id += 1
        self._open[seq_id] = _Submission(request.rid, mailbox, index, line)
        self._seq_ids[request.rid] = seq_id
        return seq_id

    def stop(self, seq_id: int) -> None:
        """Stop a submission: none of its events arrives any more. Does nothing if it has ended."""
        if seq_id in self._open:
            self._close(seq_id).line.send(Stop(seq_id))

    def abort(
        self,
        rid: str = "",
        *,
        abort_all: bool = False,
        message: str = "",
        err_type: str | None = None,
    ) -> None:
        """Ask the engine to abort all requests whose rid begins with ``rid``; their streams end
        with an abort event. An empty rid aborts none. message, err_type: see ``Abort``."""
        if not rid and not abort_all:
            return
        self.abort_submissions(
            (seq_id for own, seq_id in self._seq_ids.items() if abort_all or own.startswith(rid)),
            message=message,
            err_type=err_type,
        )

    def abort_submissions(
        self, seq_ids: Iterable[int], *, message: str = "", err_type: str | None = None
    ) -> None:
        """The same as ``abort``, for submissions by their numbers; does nothing for those that have
        ended."""
        found: dict[EngineLine, list[int]] = {}
        for seq_id in seq_ids:
            if seq_id in self._open:
                found.setdefault(self._open[seq_id].line, []).append(seq_id)
        for line, numbers in found.items():
            line.send(Abort(numbers, message, err_type))

    def shutdown(self) -> None:
        """Ask the engine to end; open requests fail."""
        if self._line is not None:
            self._line.shutdown()

    def _route(self, events: list[TokenEvent]) -> None:
        mailboxes: dict[Mailbox, None] = {}
        for event in events:
            submission = self._open.get(event.seq_id)
            if submission is None:
                continue  # stopped meanwhile: its last events were already on their way
            if event.finish is not None:
                self._close(event.seq_id)
            submission.mailbox.put(submission.index, event)
            mailboxes[submission.mailbox] = None
        self._wake_ups.add(mailboxes)

    def _fail(self, line: EngineLine) -> None:
        """End the requests of a line that has ended."""
        error = EngineDeadError(line.death)
        lost = [seq_id for seq_id, submission in self._open.items() if submission.line is line]
        for seq_id in lost:
            self._close(seq_id).mailbox.fail(error)

    def _close(self, seq_id: int) -> _Submission:
        submission = self._open.pop(seq_id)
        del self._seq_ids[submission.rid]
        return submission
