"""A request's mutable life in the scheduler: (PREPARING ->) WAITING -> RUNNING -> (RETRACTED =
WAITING again ->) FINISHED.

Counts three lengths that only coincide in a synchronous engine: *scheduled* (a KV write is
planned), *committed* (the sampled token is known) and *in flight* (planned, result not back). Once
the prompt is planned, ``num_scheduled`` is ``num_known`` + ``inflight_samples`` - 1.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

import numpy as np

from setpoint.core.grammar import Grammar
from setpoint.core.messages import Finish, LogprobBlock
from setpoint.core.request import Ids, Request
from setpoint.scheduler.cache.handle import PrefixHandle


class Status(enum.Enum):
    PREPARING = "preparing"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """SGLang: Req. Written by the scheduler only."""

    seq_id: int
    request: Request
    prompt: Ids
    max_new_tokens: int
    """Clipped at arrival: the sequence always fits the pool alone
    (docs/sglang/scheduling.md#length-limits)."""
    stop_ids: frozenset[int]
    """Ids that end the sequence; empty with ignore_eos."""
    urgency: int = 0
    """Larger is more urgent; 0 for all without priority scheduling."""
    outputs: array[int] = field(default_factory=lambda: array("i"))
    """Committed output tokens, prior outputs included."""
    num_prior: int = 0
    """Outputs that came with the request."""
    grammar: Grammar | None = None
    status: Status = Status.WAITING
    since: float = 0.0
    """Clock seconds when the sequence joined the queue or was admitted, whichever came last."""
    place: int = 0
    """In the queue's order of arrival; a retracted sequence has a new one."""
    accepted_at: float | None = None
    """Clock seconds; the next two of the first time. Written by the scheduler."""
    admitted_at: float | None = None
    """Written by ``State``."""
    first_token_at: float | None = None
    """Written at the commit."""
    arrived_at: int = 0
    """``State.num_processed`` when it joined the queue."""
    slot: int = -1
    handle: PrefixHandle | None = None
    """The locked tree path: covers ``pages[: handle.num_tokens // page_size]``, duplicates
    aside."""
    pages: array[int] = field(default_factory=lambda: array("i"))
    """The slot's page rows (``core.pagerows``), flat, in order; 0 where a window has passed."""
    first_rows: list[int] = field(default_factory=list)
    """By window of the cache: the first row whose pages are held. Empty without windows."""
    slide_at: int = 0
    """``num_scheduled`` from which on window pages may be given back."""
    duplicates: list[Ids] = field(default_factory=list)
    """Private pages for a stretch that the tree holds under other pages; in our page table until
    release."""
    ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    """Prompt + outputs as of the last admission: what prefill has to cover."""
    prefilled: bool = False
    """Every token of the last admission has KV, computed or planned. Written with each row of
    it."""
    num_scheduled: int = 0
    """Tokens whose KV is computed or planned (the cached prefix included), if the rows in flight
    bring all they may; what they did not bring is taken back."""
    inflight_steps: int = 0
    inflight_samples: int = 0
    """The most tokens that results in flight may bring."""
    num_cached: int = 0
    """Prefix hit of the first admission, in tokens."""
    num_retractions: int = 0
    num_sent: int = 0
    """Outputs already emitted."""
    output_logprobs: list[LogprobBlock] = field(default_factory=list)
    """Not yet emitted."""
    prompt_logprobs: list[LogprobBlock] = field(default_factory=list)
    embedding: bytes = b""
    """Of a pooled request: float32, set by its last step."""
    finish: Finish | None = None

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def num_known(self) -> int:
        """Committed tokens: prompt + outputs."""
        return len(self.prompt) + len(self.outputs)

    @property
    def remaining(self) -> int:
        """Outputs that may still be committed."""
        return self.max_new_tokens - len(self.outputs)

    @property
    def wants_row(self) -> bool:
        """Prefilled, and not every allowed output is committed or in flight."""
        return self.finish is None and self.prefilled and self.remaining > self.inflight_samples

    def known_ids(self) -> Ids:
        """Prompt + committed outputs, [num_known] int32."""
        if not self.outputs:
            return self.prompt
        return np.concatenate((self.prompt, np.frombuffer(self.outputs, dtype=np.int32)))
