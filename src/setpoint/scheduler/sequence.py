"""A request's mutable state in the scheduler: (PREPARING ->) WAITING -> RUNNING (-> HANDING) ->
FINISHED. A retracted sequence goes from RUNNING back to WAITING or PREPARING.

Counts three kinds of tokens: *scheduled* (a KV write is planned or done), *committed* (the token is
known) and *in flight* (planned, result not back). Once the prompt is planned, ``num_scheduled`` is
``num_known`` + ``inflight_samples`` - 1.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

import numpy as np

from setpoint.core.grammar import Grammar
from setpoint.core.logprobs import LogprobBlock
from setpoint.core.messages import Finish
from setpoint.core.prefix_digest import BLOCK_TOKENS, DIGEST_BYTES, grown
from setpoint.core.preparation import Need
from setpoint.core.request import Ids, Request, pack_ids
from setpoint.scheduler.cache.handle import PrefixHandle

MAX_FORCED = 15
"""Most forced tokens of one row, so that a row computes at most 16 tokens."""


class Status(enum.Enum):
    PREPARING = "preparing"
    WAITING = "waiting"
    RUNNING = "running"
    HANDING = "handing"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's state in the scheduler (SGLang: Req). Written by the scheduler only."""

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
    """Committed output tokens, including those that came with the request."""
    num_prior: int = 0
    """Number of outputs that came with the request."""
    grammar: Grammar | None = None
    forced: list[int] = field(default_factory=list)
    """Tokens that the grammar forces after the outputs. Written at the commit."""
    is_late: bool = False
    """Whether the grammar takes longer than the loop waits: the results of rows in flight are
    discarded, and the sequence leaves the batch with the last of them."""
    needs: set[Need] = field(default_factory=set)
    """What the sequence waits for in status PREPARING; written by ``Preparing``."""
    status: Status = Status.WAITING
    since: float = 0.0
    """Clock seconds when the sequence joined the queue or was admitted, whichever came last."""
    place: int = 0
    """Place in the queue's order of arrival; a retracted sequence gets a new one."""
    accepted_at: float | None = None
    """Clock seconds when the request was accepted; written by the scheduler."""
    admitted_at: float | None = None
    """Clock seconds of the first admission; written by ``State``."""
    first_token_at: float | None = None
    """Clock seconds when the first token was committed; written at the commit."""
    arrived_at: int = 0
    """``State.num_processed`` when the sequence joined the queue."""
    slot: int = -1
    handle: PrefixHandle | None = None
    """The locked tree path. It covers the first ``handle.num_tokens // page_size`` rows of
    ``pages``, except ``duplicates``."""
    pages: array[int] = field(default_factory=lambda: array("i"))
    """The slot's page rows (``core.pagerows``), flat, in order; 0 where a window has passed."""
    first_rows: list[int] = field(default_factory=list)
    """For each window of the cache, the first row whose pages are held. Empty without windows."""
    slide_at: int = 0
    """The value of ``num_scheduled`` from which on window pages may be given back."""
    duplicates: list[Ids] = field(default_factory=list)
    """Private pages of stretches that the tree holds under other pages; they stay in the page table
    until release."""
    ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    """Prompt and outputs at the last admission; prefill computes or matches all of them."""
    prefilled: bool = False
    """Whether every token of the last admission has KV, computed or planned. Written with each of
    its rows."""
    num_scheduled: int = 0
    """Number of tokens whose KV is computed or planned, including the cached prefix. Rows in flight
    count as if they brought back the most that they may; the commit subtracts what is missing."""
    inflight_steps: int = 0
    inflight_samples: int = 0
    """Most tokens that the results in flight may bring back."""
    num_cached: int = 0
    """Tokens that the prefix cache supplied at the first admission."""
    num_loaded: int = 0
    """Tokens of the prompt that were loaded for it before the first admission; of these,
    ``num_from_host`` from memory of this machine."""
    num_from_host: int = 0
    num_handed: int = 0
    """Tokens of the prompt that a prefill server has computed; written when the handover ends."""
    num_retractions: int = 0
    num_sent: int = 0
    """Number of outputs already sent."""
    output_logprobs: list[LogprobBlock] = field(default_factory=list)
    """Logprobs not sent yet."""
    prompt_logprobs: list[LogprobBlock] = field(default_factory=list)
    hidden_states: list[bytes] = field(default_factory=list)
    """Hidden states not sent yet, float32."""
    num_hidden_states: int = 0
    """Number of positions whose hidden states were brought back, if asked for; written at the
    commit."""
    token_facts: dict[str, list[bytes]] = field(default_factory=dict)
    """Facts about outputs that were not sent yet (``TokenEvent.token_facts``)."""
    known_digests: dict[int, bytes] = field(default_factory=dict)
    """Tokens of a block -> the digests of the first blocks; written by ``digests``."""
    embedding: bytes = b""
    """The vector of a pooled request, float32; set by its last step."""
    finish: Finish | None = None

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def num_known(self) -> int:
        """Number of committed tokens: prompt + outputs."""
        return len(self.prompt) + len(self.outputs)

    @property
    def remaining(self) -> int:
        """Number of outputs that may still be committed."""
        return self.max_new_tokens - len(self.outputs)

    @property
    def wants_row(self) -> bool:
        """Whether decode should plan a row: the prompt is computed or planned, and not every
        allowed output is committed or in flight."""
        return (
            self.finish is None
            and self.prefilled
            and not self.is_late
            and self.remaining > self.inflight_samples
        )

    @property
    def forced_next(self) -> list[int]:
        """The forced tokens that no row in flight computes. At least one output remains for a
        sampled token."""
        begin = self.inflight_samples  # a row with a grammar brings back all that it may
        return self.forced[begin : max(begin, self.remaining - 1)]

    def digests(self, num_tokens: int, block: int = BLOCK_TOKENS) -> bytes:
        """The digests of the whole blocks of ``block`` tokens in the first known tokens
        (``core.prefix_digest``). Each block is hashed once."""
        end = num_tokens // block * DIGEST_BYTES
        known = self.known_digests.get(block, b"")
        if block == BLOCK_TOKENS:
            known = known or self.request.digests
        if len(known) < end:
            namespace = self.request.options.namespace
            known = grown(known, pack_ids(self.known_ids()), namespace, block=block)
            self.known_digests[block] = known
        return known[:end]

    def known_ids(self) -> Ids:
        """Prompt + committed outputs, [num_known] int32."""
        if not self.outputs:
            return self.prompt
        return np.concatenate((self.prompt, np.frombuffer(self.outputs, dtype=np.int32)))
