"""Sends the frontend's requests to engines and receives their events. The client outlives each
engine.

There are one or several ranks, each with one engine at a time. A line is the connection to one
engine (``ipc.line``), and ``ipc.engine_life`` says which engines take requests or may come. An open
request has a number and a name (rid), and is on one line. When that line's engine ends and another
may follow, the client sends the request again, with the outputs that its reader has, to an engine
that continues with the same tokens (decision 0056). This module knows nothing of text or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from setpoint.core.control import RequestList
from setpoint.core.errors import EngineDeadError, RequestError, SetpointError
from setpoint.core.excerpt import excerpt
from setpoint.core.messages import (
    Abort,
    Blocks,
    Cached,
    Finish,
    Stop,
    Submit,
    TokenEvent,
)
from setpoint.core.request import Request
from setpoint.core.standing import Standing
from setpoint.ipc.balance import Balance, EngineLoad, TotalRequests
from setpoint.ipc.block_sink import BlockSink
from setpoint.ipc.engine_life import EngineLife, EngineLives
from setpoint.ipc.gate import Gate, OpenGate
from setpoint.ipc.line import EngineLine
from setpoint.ipc.mailbox import Mailbox, WakeUps
from setpoint.ipc.orders import Orders
from setpoint.ipc.presence import Presence
from setpoint.ipc.submission import Submission
from setpoint.ipc.suspects import Suspects, Verdict

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANNOT_BE_SENT = "A value of this request cannot be sent to the engine: "


class EngineClient:
    """Contract: every submission ends with a finish event, ``stop`` or a failed mailbox.

    Each submission has a number that is never used again, and another number on each line, so a
    late message cannot reach a later submission with the same rid.
    """

    def __init__(
        self,
        lives: EngineLives | None = None,
        *,
        balance: Balance | None = None,
        blocks: BlockSink | None = None,
    ) -> None:
        """lives: the engines. If they recover, requests survive the end of their engine, and the
        code that starts engines must call ``lost`` when it gives a rank up. With None they do not.
        balance: chooses the engine of a request; with None, the engine with the fewest requests
        gets it. blocks: gets every change of the engines' caches."""
        self.lives = lives or EngineLives()
        self.blocks = blocks
        self._balance = balance or TotalRequests()
        self._lines: dict[int, EngineLine] = {}
        """Rank -> its latest line."""
        self._loads: dict[EngineLine, EngineLoad] = {}
        """Line that has not ended -> its load."""
        self._presence = Presence()
        self.num_moved = 0
        """How often a request has moved after the end of its engine."""
        self._open: dict[int, Submission] = {}
        """Number that the owner knows -> open submission."""
        self._sent: dict[int, Submission] = {}
        """Number on its line -> submission that an engine has."""
        self._numbers: dict[str, int] = {}
        """rid -> number, for the open submissions."""
        self._next_number = 0
        self.num_submitted = 0
        """Requests accepted so far."""
        self._waiting: list[Submission] = []
        """Submissions that wait for an engine to be ready."""
        self.gate: Gate = OpenGate()
        """Set at the start if the model is not always loaded."""
        self._held: list[Submission] = []
        """New submissions that the gate has not admitted yet, oldest first."""
        self._suspects = Suspects()
        self.orders = Orders(self)
        """What holds for the engines, whichever they are."""
        self._wake_ups = WakeUps()

    def attach(self, line: EngineLine) -> None:
        """Send requests on this line as soon as it is ready. Must be called inside the running
        loop. An earlier line of the same rank must have ended; nothing more is received on it."""
        earlier = self._lines.get(line.rank)
        if earlier is not None:
            assert earlier.life.has_ended, "the rank's earlier line is still in use"
            earlier.close()
        self._lines[line.rank] = line
        self.lives.start(line.life)
        self._presence.attached(line)
        self._loads[line] = EngineLoad(line.rank, self._balance.uses_prefixes)
        self.orders.attached(line)
        line.start(
            partial(self._route, line),
            partial(self._ended, line),
            self._became_ready,
            partial(self._cached, line),
        )

    def close(self) -> None:
        for line in self._lines.values():
            line.close()

    def held_prefixes(self) -> bytes:
        """Hashes of the prefixes that the engines' caches hold, as far as the engines report
        them."""
        return b"".join(load.held for load in self._loads.values())

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Number of open requests that have no engine at the moment."""
        return len(self.waiting_numbers)

    @property
    def num_recomputed(self) -> int:
        """Number of open requests that have moved and have got no output since."""
        return sum(each.has_moved and not each.ids for each in self._open.values())

    @property
    def waiting_numbers(self) -> list[int]:
        """The numbers of the open requests that have no engine at the moment."""
        return [each.number for each in self._held + self._waiting + self._suspects.waiting]

    def standings(self) -> list[Standing]:
        """The state of each engine, in the order of ranks."""
        found = []
        for line in self.lines:
            load = self._loads.get(line)
            why_last = line.life.why_last or ("" if self.lives.recovers else line.life.death)
            found.append(self._presence.standing(line, self.orders, load, why_last))
        return found

    @property
    def lines(self) -> list[EngineLine]:
        """The latest line of each rank, in the order of ranks; any of them may have ended."""
        return [self._lines[rank] for rank in sorted(self._lines)]

    @property
    def ranks(self) -> Collection[int]:
        """All ranks, whether or not their engines live."""
        return self._lines.keys()

    @property
    def line(self) -> EngineLine | None:
        """The latest line of the first rank, which may have ended; None before the first."""
        return self.lines[0] if self._lines else None

    @property
    def is_ready(self) -> bool:
        """Whether a request would be processed now."""
        return self.lives.is_ready

    def choose(self) -> EngineLine:
        """A line to which a control call can be sent. Raises EngineDeadError if there is none."""
        lines = self.lines
        for line in lines:
            if line.life.is_ready:
                return line
        if not lines:
            raise EngineDeadError("There is no engine yet.")
        coming = [line for line in lines if not line.life.why_last]
        if not coming:
            raise EngineDeadError(lines[0].life.why_last)
        coming[0].check_ready()
        return coming[0]

    async def on_all(
        self,
        call: Callable[[EngineLine], Awaitable[T]],
        lines: Sequence[EngineLine] | None = None,
    ) -> list[T]:
        """The answers to a control call from all engines that take requests, in the order of ranks,
        or from these. An engine that ends meanwhile is left out if another one answers. Raises
        EngineDeadError if there is no engine, and otherwise the first error of an engine that has
        not ended."""
        return await _answers(lines or self.ready() or [self.choose()], call)

    async def list_requests(self, *, timeout_s: float) -> list[tuple[int, RequestList]]:
        """The requests of each engine, by rank, with the numbers that ``submit`` returned. Raises
        EngineDeadError if there is no engine."""

        async def ask(line: EngineLine) -> tuple[int, RequestList]:
            return line.rank, self._numbered(await line.list_requests(timeout_s=timeout_s))

        return await self.on_all(ask)

    def _numbered(self, listed: RequestList) -> RequestList:
        """The list with the numbers that the owners of the requests know, without requests that
        have ended meanwhile."""

        def numbers(wires: Iterable[int]) -> list[int]:
            return [self._sent[wire].number for wire in wires if wire in self._sent]

        return msgspec.structs.replace(
            listed,
            preparing=numbers(listed.preparing),
            queue=numbers(listed.queue),
            retracted=numbers(listed.retracted),
            running=numbers(listed.running),
            outputs={
                self._sent[wire].number: count
                for wire, count in listed.outputs.items()
                if wire in self._sent
            },
            prefilling=next(
                iter(numbers([] if listed.prefilling is None else [listed.prefilling])), None
            ),
        )

    async def on(
        self, ranks: Collection[int] | None, call: Callable[[EngineLine], Awaitable[T]]
    ) -> list[T]:
        """``on_all``, or the same for those of these ranks that are ready; there may be none if one
        may come."""
        if ranks is None:
            return await self.on_all(call)
        if self.lives.has_ended:
            self.choose()  # raises the reason
        return await _answers([line for line in self.ready() if line.rank in ranks], call)

    def open_on(self, ranks: Collection[int]) -> list[int]:
        """The numbers of the open requests that engines of these ranks have; if these are all, also
        of those that wait for one."""
        takes_waiting = len(ranks) == len(self.ranks)
        return [
            number
            for number, each in self._open.items()
            if (takes_waiting if each.line is None else each.line.rank in ranks)
        ]

    def submit(self, request: Request, mailbox: Mailbox, index: int = 0) -> int:
        """Send a request whose events go to ``mailbox`` under ``index``. Returns the number with
        which to ``stop`` it. Raises RequestError (400) for a rid that is in use or a number that
        does not fit into a message, and EngineDeadError if there is no engine.
        """
        if not self.lives.may_come():
            self.choose()
        if request.rid in self._numbers:
            raise RequestError(
                f"Duplicate request ID {request.rid!r}: a request with this rid is still running."
            )
        submission = Submission(self._take_number(), request, mailbox, index)
        mailbox.wake_ups = self._wake_ups
        is_admitted = self.gate.arrived()
        try:
            if is_admitted:
                self._place(submission)
            else:
                self._held.append(submission)
        except (OverflowError, UnicodeEncodeError) as error:
            self.gate.ended()
            raise RequestError(f"{CANNOT_BE_SENT}{error}.") from None
        self.num_submitted += 1
        self._open[submission.number] = submission
        self._numbers[request.rid] = submission.number
        return submission.number

    def admit_held(self) -> None:
        """Send all requests that are held to the engine: the gate has admitted them."""
        held, self._held = self._held, []
        for submission in held:
            submission.mailbox.on_admitted()
            try:
                self._place(submission)
            except (OverflowError, UnicodeEncodeError) as error:
                self._drop(submission).mailbox.fail(RequestError(f"{CANNOT_BE_SENT}{error}."))

    def fail_held(self, error: SetpointError) -> None:
        """End all requests that are held with an error."""
        while self._held:
            self._drop(self._held[0]).mailbox.fail(error)

    def stop(self, number: int) -> None:
        """Stop a submission: no further event arrives. Does nothing if it has ended."""
        submission = self._open.get(number)
        if submission is not None:
            line, wire = submission.line, submission.wire
            self._close(submission)
            if line is not None:
                line.send(Stop(wire))

    def abort(
        self,
        rid: str = "",
        *,
        abort_all: bool = False,
        message: str = "",
        err_type: str | None = None,
    ) -> None:
        """Ask the engines to abort all requests whose rid begins with ``rid``; their streams end
        with an abort event. An empty rid aborts none. message, err_type: see ``Abort``."""
        if not rid and not abort_all:
            return
        self.abort_submissions(
            [number for own, number in self._numbers.items() if abort_all or own.startswith(rid)],
            message=message,
            err_type=err_type,
        )

    def abort_submissions(
        self, numbers: Iterable[int], *, message: str = "", err_type: str | None = None
    ) -> None:
        """Like ``abort``, for submissions given by their numbers. Does nothing for those that have
        ended."""
        found: dict[EngineLine, list[int]] = {}
        status = None if err_type is None else 503
        finish = Finish("abort", message=message, err_type=err_type, status_code=status)
        for submission in [self._open[each] for each in numbers if each in self._open]:
            if submission.line is None:
                self._finish(submission, finish)
            else:
                submission.aborted = finish
                found.setdefault(submission.line, []).append(submission.wire)
        for line, wires in found.items():
            line.send(Abort(wires, message, err_type))

    def shutdown(self) -> None:
        """Ask the engines to end; open requests fail."""
        self.lives.end()
        for line in self._lines.values():
            line.shutdown()
        self._fail_waiting("The engine is shutting down.")

    def retire(self, rank: int, reason: str) -> None:
        """Take a rank out of service: its engine is asked to end, and its requests continue on the
        other engines."""
        self._lines[rank].life.retire(reason)
        self._lines[rank].shutdown(reason)
        self.dispatch()

    def lost(self, rank: int, reason: str) -> None:
        """Note that the rank, whose engine has ended, gets no further one. If it was the last rank,
        all waiting requests end."""
        self._lines[rank].close()
        self._lines[rank].life.give_up(reason)
        self.dispatch()
        if self.lives.has_ended:
            self._fail_waiting(reason)

    def _route(self, line: EngineLine, events: list[TokenEvent]) -> None:
        mailboxes: dict[Mailbox, None] = {}
        for event in events:
            submission = self._sent.get(event.seq_id)
            if submission is None or submission.line is not line:
                continue  # it was stopped while these events were on their way
            if event.ids and event.num_outputs - len(event.ids) != submission.num_outputs:
                line.died(
                    f"It sent outputs up to {event.num_outputs} of a request that had"
                    f" {submission.num_outputs}, {len(event.ids)} of them new."
                )
                break
            if submission.has_moved:
                event = submission.take(event)
            if event.finish is not None:
                self._close(submission)
            else:
                submission.keep(event)
                if submission.strikes and event.ids:
                    self._clear(submission)
            submission.mailbox.put(submission.index, event)
            mailboxes[submission.mailbox] = None
        self._wake_ups.add(mailboxes)

    def _cached(self, line: EngineLine, news: Cached | Blocks) -> None:
        if isinstance(news, Cached):
            self._loads[line].take(news)
        elif self.blocks is not None:
            self.blocks.take(line.rank, news.events)

    def _place(self, submission: Submission) -> None:
        """Send a submission to the engine that is chosen for it, or let it wait if there is
        none."""
        if self._balance.uses_prefixes:
            submission.request = submission.request.with_digests()
        wanted = submission.request.options.routed_dp_rank
        pinned = [line for line in self._without_suspects(self.ready()) if line.rank == wanted]
        lines = self._without_suspects(self._lines_for_new_requests())
        if pinned or len(lines) == 1:
            self._send(submission, (pinned or lines)[0])
        elif not lines:
            self._waiting.append(submission)
        else:
            loads = [self._loads[line] for line in lines]
            self._send(submission, lines[self._balance.choose(loads, submission.request)])

    def _send(self, submission: Submission, line: EngineLine) -> None:
        wire = submission.number if submission.wire < 0 else self._take_number()
        line.send(Submit(wire, submission.request))
        submission.line, submission.wire = line, wire
        submission.mailbox.ranks[submission.index] = line.rank
        self._sent[wire] = submission
        self._loads[line].add(submission.request)

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def ready(self) -> list[EngineLine]:
        return [line for line in self.lines if line.life.is_ready]

    def _without_suspects(self, lines: list[EngineLine]) -> list[EngineLine]:
        """The lines that try no suspects; if there are none, all of ``lines``."""
        return [line for line in lines if not self._suspects.tries(line)] or lines

    def _lines_for_new_requests(self) -> list[EngineLine]:
        """The lines to which a new request may go: those that are not paused or, if there is none
        and none may come, the paused lines, where it waits."""
        ready = self.ready()
        paused = self.orders.paused
        free = [line for line in ready if line.rank not in paused]
        return free if free or self.lives.may_come(without=paused) else ready

    def dispatch(self) -> None:
        """Send waiting submissions, as far as engines can take them."""
        while self._suspects.waiting and (line := self._line_for_suspects()) is not None:
            for submission in self._suspects.next_group(line):
                self._send(submission, line)
        if self._waiting and self.is_ready:
            waiting, self._waiting = self._waiting, []
            for submission in waiting:
                self._place(submission)

    def _became_ready(self, lives: Collection[EngineLife]) -> None:
        for life in lives:
            line = self._lines[life.rank]
            self._presence.ready(line)
            self.orders.tell(line)
            self.dispatch()

    def _line_for_suspects(self) -> EngineLine | None:
        """The line that is to try the next suspects: a line that tries no others and, as long as
        there may be such a line, computes no other requests."""
        free = self._suspects.free_lines(self._lines_for_new_requests())
        idle = [
            line
            for line in free
            if self._suspects.tries(line) or not self._loads[line].num_requests
        ]
        lines = idle if idle or self.lives.may_come() else free
        return min(lines, key=lambda line: self._loads[line].num_requests, default=None)

    def _clear(self, submission: Submission) -> None:
        """Note that a suspect did not end its engine."""
        line = submission.line
        assert line is not None
        if self._suspects.clear(submission):
            self.dispatch()
            self._suspects.release(line)

    def _ended(self, line: EngineLine) -> None:
        """Move the requests of a line that has ended or, if they cannot move, end them with its
        reason."""
        if self.blocks is not None:
            self.blocks.cleared(line.rank)
        del self._loads[line]
        self._presence.ended(line)
        self.orders.ended(line)
        error = EngineDeadError(line.life.death)
        lost = [each for each in self._open.values() if each.line is line]
        for submission, verdict in self._suspects.judge(line, lost):
            del self._sent[submission.wire]
            submission.line = None
            if not self.lives.recovers:
                self._drop(submission).mailbox.fail(error)
            elif verdict is Verdict.GUILTY:
                self._blame(submission, line.life.death)
            else:
                submission.go_on()
                if submission.aborted is not None:
                    self._finish(submission, submission.aborted)
                    continue
                self.num_moved += 1
                is_suspect = verdict is Verdict.SUSPECT
                (self._suspects.waiting if is_suspect else self._waiting).append(submission)
        self._suspects.sort()
        self.dispatch()
        if self.lives.has_ended:
            self._fail_waiting(line.life.death)

    def _blame(self, submission: Submission, death: str) -> None:
        self._drop(submission).mailbox.fail(
            RequestError(
                f"The request is not tried again, because {submission.strikes} engines in turn"
                f" ended while they computed it. The last one: {death}",
                status_code=500,
            )
        )
        logger.error(
            "The request %s is not tried again: %d engines in turn ended while they computed it.",
            excerpt(submission.request.rid),
            submission.strikes,
        )

    def _fail_waiting(self, reason: str) -> None:
        self.fail_held(EngineDeadError(reason))
        waiting = self._waiting + self._suspects.waiting
        self._waiting, self._suspects.waiting = [], []
        for submission in waiting:
            self._drop(submission).mailbox.fail(EngineDeadError(reason))

    def _finish(self, submission: Submission, finish: Finish) -> None:
        """End a submission that waits for an engine in the way in which an engine would end it."""
        self._close(submission)
        submission.mailbox.put(submission.index, submission.finished(finish))
        self._wake_ups.add([submission.mailbox])

    def _close(self, submission: Submission) -> None:
        """Forget a submission that has ended or that nobody reads any more."""
        line = submission.line
        if line is None:
            for group in (self._waiting, self._suspects.waiting):
                if submission in group:
                    group.remove(submission)
        else:
            del self._sent[submission.wire]
            self._loads[line].remove(submission.request)
        self._drop(submission)
        if self._suspects.is_tried(submission):
            self._clear(submission)
        elif line is not None and self._suspects.waiting and not self._loads[line].num_requests:
            self.dispatch()

    def _drop(self, submission: Submission) -> Submission:
        del self._open[submission.number]
        del self._numbers[submission.request.rid]
        if submission in self._held:
            position = self._held.index(submission)
            del self._held[position]
            self.gate.gave_up(position)
        else:
            self.gate.ended()
        return submission


async def _answers(
    lines: Sequence[EngineLine], call: Callable[[EngineLine], Awaitable[T]]
) -> list[T]:
    """The answers to the call on each line. A line that ends meanwhile is left out if another one
    answers."""
    found = await asyncio.gather(*map(call, lines), return_exceptions=True)
    answers = [each for each in found if not isinstance(each, BaseException)]
    for line, each in zip(lines, found, strict=True):
        if isinstance(each, BaseException) and not (answers and line.life.has_ended):
            raise each
    return answers
