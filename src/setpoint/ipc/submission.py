"""An open request of the EngineClient. It may move from engine to engine; this module makes the
request to send to the next engine, and converts that engine's events to what the reader expects."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from setpoint.core.messages import Finish, TokenEvent
from setpoint.core.request import Request

if TYPE_CHECKING:
    from setpoint.ipc.line import EngineLine
    from setpoint.ipc.mailbox import Mailbox


@dataclass(slots=True, eq=False)
class Submission:
    """The client writes all fields except ``strikes`` and ``was_tried``, which Suspects writes."""

    number: int
    """The number by which its owner knows it."""
    request: Request
    """The request as it was last sent, with the outputs that it had when it came to its current
    line."""
    mailbox: Mailbox
    index: int
    """Index of the sequence among the sequences of its mailbox."""
    line: EngineLine | None = None
    """None while it waits for an engine."""
    wire: int = -1
    """Its number on its current line."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    """The outputs that came on its current line."""
    has_moved: bool = False
    """Whether it was on an earlier line, which has ended."""
    last: TokenEvent | None = None
    """The last event from its current line."""
    before: TokenEvent | None = None
    """The last event from earlier lines."""
    num_hidden_bytes: int = 0
    """Length of the hidden states that its mailbox has got."""
    num_hidden_to_skip: int = 0
    """How many bytes of the hidden states to come its mailbox already has."""
    aborted: Finish | None = None
    """How it is to end: its engine has been asked to end it, but may end itself before."""
    strikes: int = 0
    """How many engines in turn have died while they computed it, without a new output in
    between."""
    was_tried: bool = False
    """Whether the last of these engines was trying it, alone or with others."""

    @property
    def num_outputs(self) -> int:
        """How many outputs its mailbox has."""
        return len(self.request.prior_output_ids) // 4 + len(self.ids)

    def take(self, event: TokenEvent) -> TokenEvent:
        """The event of its current engine in the form that its reader expects, if it has moved."""
        if self.num_hidden_to_skip:
            event = _without_known(self, event)
        return event if self.before is None else _continued(self.before, event)

    def keep(self, event: TokenEvent) -> None:
        """Remember what its reader has got with this event, in case the engine ends."""
        self.ids.extend(event.ids)
        self.num_hidden_bytes += len(event.hidden_states)
        self.last = event

    def go_on(self) -> None:
        """Change its request so that the next engine continues after the outputs that its reader
        has."""
        request = self.request
        if self.ids:
            logprobs = request.options.logprobs
            if logprobs is not None and logprobs.start >= 0:  # the reader has the prompt's
                logprobs = msgspec.structs.replace(logprobs, start=-1)
            self.request = msgspec.structs.replace(
                request,
                options=msgspec.structs.replace(request.options, logprobs=logprobs),
                prior_output_ids=request.prior_output_ids + self.ids.tobytes(),
            )
            self.before = self.last
        self.request = msgspec.structs.replace(self.request, was_accepted=True)
        self.ids, self.has_moved = array("i"), True
        self.num_hidden_to_skip = self.num_hidden_bytes if request.options.hidden_states else 0

    def finished(self, finish: Finish) -> TokenEvent:
        """Its last event, for an end while no engine has it."""
        known = self.before or TokenEvent(self.number, [])
        return TokenEvent(
            known.seq_id,
            [],
            finish,
            num_prompt=known.num_prompt,
            num_outputs=known.num_outputs,
            num_cached=known.num_cached,
            num_loaded=known.num_loaded,
            num_from_host=known.num_from_host,
            num_retractions=known.num_retractions,
        )


def _without_known(submission: Submission, event: TokenEvent) -> TokenEvent:
    """The event without the hidden states that the mailbox already has: the new engine computes the
    prompt and the outputs so far again, and sends their hidden states again."""
    num_skipped = min(submission.num_hidden_to_skip, len(event.hidden_states))
    submission.num_hidden_to_skip -= num_skipped
    return msgspec.structs.replace(event, hidden_states=event.hidden_states[num_skipped:])


def _continued(before: TokenEvent, event: TokenEvent) -> TokenEvent:
    """The event of a moved request as its first engine would have sent it: for the client, its
    prompt was computed only once."""
    return msgspec.structs.replace(
        event,
        num_cached=before.num_cached,
        num_loaded=before.num_loaded,
        num_from_host=before.num_from_host,
        num_retractions=before.num_retractions + event.num_retractions,
        timing=None,
        prompt_logprobs=None,
    )
