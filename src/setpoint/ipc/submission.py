"""An open request of the EngineClient: what is known of it while it goes from engine to engine, the
request to send to the next one, and the next one's events as its reader expects them."""

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
    """The client writes all fields, except those of a trial, which Suspects writes."""

    number: int
    """What its owner knows it by."""
    request: Request
    """As it was sent last: with the outputs that it had when it came to its present line."""
    mailbox: Mailbox
    index: int
    """Index of the sequence among the sequences of its mailbox."""
    line: EngineLine | None = None
    """None while it waits for an engine."""
    wire: int = -1
    """Its number on that line."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    """The outputs that came on that line."""
    has_moved: bool = False
    """Whether an earlier line of it has ended."""
    last: TokenEvent | None = None
    """The last event of that line."""
    before: TokenEvent | None = None
    """The last event of the lines before."""
    num_hidden_bytes: int = 0
    """Length of the hidden states that its mailbox has."""
    num_hidden_to_skip: int = 0
    """How many of the bytes to come its mailbox has already."""
    strikes: int = 0
    """How many engines have died in turn with it in their steps, and without a new output of it."""
    was_tried: bool = False
    """Whether the last of them was trying it, alone or with others."""

    @property
    def num_outputs(self) -> int:
        """How many outputs its mailbox has."""
        return len(self.request.prior_output_ids) // 4 + len(self.ids)

    def take(self, event: TokenEvent) -> TokenEvent:
        """The event of its present engine as its reader is to see it."""
        if self.num_hidden_to_skip:
            event = _without_known(self, event)
        return event if self.before is None else _continued(self.before, event)

    def keep(self, event: TokenEvent) -> None:
        """Keep what its reader has got by this event, in case the engine ends."""
        self.ids.extend(event.ids)
        self.num_hidden_bytes += len(event.hidden_states)
        self.last = event

    def go_on(self) -> None:
        """Have its request go on behind the outputs that its reader has."""
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
        """Its last event if it ends while no engine has it."""
        known = self.before or TokenEvent(self.number, [])
        return TokenEvent(
            known.seq_id,
            [],
            finish,
            num_prompt=known.num_prompt,
            num_outputs=known.num_outputs,
            num_cached=known.num_cached,
            num_retractions=known.num_retractions,
        )


def _without_known(submission: Submission, event: TokenEvent) -> TokenEvent:
    """The event without the hidden states that the mailbox has: the new engine has computed the
    prompt and the outputs so far again, and sends theirs, too."""
    num_skipped = min(submission.num_hidden_to_skip, len(event.hidden_states))
    submission.num_hidden_to_skip -= num_skipped
    return msgspec.structs.replace(event, hidden_states=event.hidden_states[num_skipped:])


def _continued(before: TokenEvent, event: TokenEvent) -> TokenEvent:
    """The event of a request that has moved, as its first engine would have sent it: its prompt was
    computed once, as far as its client is concerned."""
    return msgspec.structs.replace(
        event,
        num_cached=before.num_cached,
        num_retractions=before.num_retractions + event.num_retractions,
        timing=None,
        prompt_logprobs=None,
    )
