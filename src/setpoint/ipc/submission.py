"""An open request of the EngineClient: what is known of it while it goes from engine to engine."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from setpoint.core.messages import TokenEvent
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
