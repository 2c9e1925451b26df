"""Decides how much of the clients' content a recording keeps: everything, or (the default) only
what plans depend on. The writing thread calls it with the records in order.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np

from setpoint.core.control import (
    Change,
    Continue,
    FlushCache,
    GetMoments,
    GetState,
    Hold,
    ListRequests,
    Operate,
    Pause,
)
from setpoint.core.handover import PromptReceived, PromptSent, PromptWanted
from setpoint.core.messages import (
    Abort,
    Finish,
    PagesMoved,
    PrefixFound,
    Prepared,
    Shutdown,
    Stop,
    Submit,
    ToLoop,
    encode,
)
from setpoint.core.operations import (
    AttachStorage,
    LoadWeights,
    Operation,
    RecordExperts,
    StartProfile,
)
from setpoint.core.plan import Admit, StepPlan
from setpoint.core.request import Request, RequestOptions, pack_ids
from setpoint.core.result import StepResult
from setpoint.recording.chain import ID_BYTES, Chain, Places, pseudonym
from setpoint.recording.format import KeptArrival, KeptMessage


@dataclass(slots=True)
class KeptTokens:
    """The sampled tokens of a result, as KeptResult holds them."""

    ids: bytes = b""
    ends: list[int] = field(default_factory=list)
    invalid: list[int] = field(default_factory=list)
    hashes: bytes = b""


class Content(Protocol):
    def name(self, name: str) -> str:
        """The name that the recording holds in place of a rid, a namespace or a routing key."""
        ...

    def finish(self, finish: Finish) -> Finish:
        """The end of a sequence as the recording holds it: without a message that could quote the
        client."""
        ...

    def message(self, message: ToLoop) -> KeptMessage | KeptArrival: ...

    def note_plan(self, plan: StepPlan) -> None:
        """Called for each plan, before its result."""

    def note_late(self, seq_id: int) -> None:
        """Called when a sequence's grammar is late: its results are discarded until it is admitted
        again."""

    def checksum(self, admit: Admit) -> int:
        """Checksum of the ids, for comparison; 0 if ids cannot be compared."""
        ...

    def sampled_tokens(self, result: StepResult) -> KeptTokens: ...


class Open:
    """Keeps content unchanged."""

    def finish(self, finish: Finish) -> Finish:
        return finish

    def name(self, name: str) -> str:
        return name

    def message(self, message: ToLoop) -> KeptMessage:
        if isinstance(message, Submit):  # the ids tell its digests
            request = msgspec.structs.replace(message.request, digests=b"")
            message = Submit(message.seq_id, request)
        if isinstance(message, PromptReceived) and message.handed is not None:
            bare = msgspec.structs.replace(message.handed, logprobs=None, token_facts={})
            message = msgspec.structs.replace(message, handed=bare)
        return KeptMessage(msgspec.Raw(encode(message)))

    def note_plan(self, plan: StepPlan) -> None:
        """Does nothing: ids are kept without regard to the plan."""

    def note_late(self, seq_id: int) -> None:
        """Does nothing: discarded tokens are kept like the others."""

    def checksum(self, admit: Admit) -> int:
        return zlib.crc32(pack_ids(admit.ids))

    def sampled_tokens(self, result: StepResult) -> KeptTokens:
        return KeptTokens(ids=pack_ids(result.token_ids))


class Surrogates(Open):
    """The content of a replay that runs on surrogates: the names in its records can be compared
    with the recorded ones, the ids cannot."""

    def finish(self, finish: Finish) -> Finish:
        return _without_quotes(finish)

    def checksum(self, admit: Admit) -> int:
        return 0


@dataclass(slots=True)
class _Running:
    """A sequence in a slot."""

    chain: Chain
    stop_ids: frozenset[int]


LEFT_OUT = {
    "prompt_ids": "the hashes of its prefixes replace them",
    "prior_output_ids": "like prompt_ids",
    "digests": "like prompt_ids",
    "sampling": "its fields are decided one by one",
    "stop": "has_stop says whether there are any, or any of stop_regex",
    "stop_regex": "like stop",
    "stop_token_ids": "KeptResult.ends says which tokens were stop ids",
} | dict.fromkeys(
    (
        "min_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "no_stop_trim",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "logit_bias",
        "n",
        "sampling_seed",
    ),
    "it affects tokens or text, but no plan",
)
"""Field of a Request or of its SamplingParams -> why it is left out if content is withheld."""


def _without_quotes(finish: Finish) -> Finish:
    """``finish`` without the message of a refusal, which may quote the client. The messages of
    other ends are the engine's own."""
    refused = finish.status_code is not None and finish.status_code < 500
    return msgspec.structs.replace(finish, message=None) if refused else finish


class Withheld:
    """Keeps no text, id or name that a client sent or received."""

    DECIDED = frozenset(
        {
            Submit,
            Abort,
            Stop,
            Shutdown,
            Prepared,
            PrefixFound,
            PagesMoved,
            PromptWanted,
            PromptSent,
            PromptReceived,
            GetState,
            GetMoments,
            ListRequests,
            FlushCache,
            Change,
            Pause,
            Hold,
            Continue,
            Operate,
        }
    )
    """The types of messages that may be kept. Content is removed from some: a Submit keeps only the
    fields of KeptArrival, a Prepared loses the message of a refusal, and in a Change the author and
    the reason, in an Operate the path become pseudonyms. The others are kept whole."""

    def __init__(
        self, places: Places, *, vocab_size: int, eos_ids: frozenset[int], key: bytes
    ) -> None:
        """key: 32 random bytes, which are stored nowhere."""
        self._places = places
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._key = key
        self._running: dict[int, _Running] = {}
        """seq_id -> the sequence."""
        self._slots: dict[int, int] = {}
        """Slot -> seq_id."""

    def name(self, name: str) -> str:
        return pseudonym(name, self._key)

    def finish(self, finish: Finish) -> Finish:
        return _without_quotes(finish)

    def message(self, message: ToLoop) -> KeptMessage | KeptArrival:
        assert type(message) in self.DECIDED
        if isinstance(message, Submit):
            return self._arrival(message.seq_id, message.request)
        if isinstance(message, Prepared) and message.finish is not None:
            message = Prepared(message.seq_id, self.finish(message.finish))
        if isinstance(message, PromptReceived):
            message = msgspec.structs.replace(message, handed=None)
        if isinstance(message, Change):
            by, why = self.name(message.by), self.name(message.why)
            message = msgspec.structs.replace(message, by=by, why=why)
        if isinstance(message, Operate):
            message = Operate(message.id, self._without_path(message.operation))
        return KeptMessage(msgspec.Raw(encode(message)))

    def _without_path(self, operation: Operation) -> Operation:
        match operation:
            case LoadWeights(folder):
                return msgspec.structs.replace(operation, folder=self.name(folder))
            case AttachStorage():  # its settings may have a password
                return msgspec.structs.replace(operation, settings="")
            case StartProfile(path) | RecordExperts(_, path):
                return msgspec.structs.replace(operation, path=self.name(path))
        return operation

    def _arrival(self, seq_id: int, request: Request) -> KeptArrival:
        sampling, packed = request.sampling, request.prompt_ids + request.prior_output_ids
        ids = np.frombuffer(packed, "<i4")
        return KeptArrival(
            seq_id=seq_id,
            rid=self.name(request.rid),
            num_prompt=len(request.prompt()),
            num_prior=len(request.prior_outputs()),
            hashes=Chain(self._places, self._key).extend(packed),
            is_valid=bool(((ids >= 0) & (ids < self._vocab_size)).all()),
            max_new_tokens=sampling.max_new_tokens,
            ignore_eos=sampling.ignore_eos,
            has_stop=sampling.has_text_stops,
            stream_interval=sampling.stream_interval,
            options=self._without_content(request.options),
            seed=request.seed,
            was_accepted=request.was_accepted,
        )

    def _without_content(self, options: RequestOptions) -> RequestOptions:
        logprobs = options.logprobs
        if logprobs is not None:
            logprobs = msgspec.structs.replace(logprobs, ids=())
        return msgspec.structs.replace(
            options,
            namespace=self.name(options.namespace),
            routing_key=self.name(options.routing_key),
            logprobs=logprobs,
            constrain_after=(),
            bootstrap=None,
        )

    def note_plan(self, plan: StepPlan) -> None:
        for slot in plan.releases:
            self._running.pop(self._slots.pop(slot, -1), None)
        for admit in plan.admits:
            self._running.pop(self._slots.get(admit.slot, -1), None)
            chain = Chain(self._places, self._key)
            chain.skip(admit.ids)
            sampling = admit.sampling
            stop_ids = self._eos_ids.union(sampling.stop_token_ids)
            self._running[admit.seq_id] = _Running(
                chain, frozenset() if sampling.ignore_eos else stop_ids
            )
            self._slots[admit.slot] = admit.seq_id

    def note_late(self, seq_id: int) -> None:
        self._running.pop(seq_id, None)

    def checksum(self, admit: Admit) -> int:
        return 0

    def sampled_tokens(self, result: StepResult) -> KeptTokens:
        sampled, hashes, packed = KeptTokens(), [], pack_ids(result.token_ids)
        tokens, ends = result.token_ids.tolist(), result.offsets.tolist()
        for seq_id, (begin, end) in zip(result.seq_ids.tolist(), pairwise(ends), strict=True):
            running = self._running.get(seq_id)
            if running is None:
                continue
            for index in range(begin, end):
                if tokens[index] < 0:
                    sampled.invalid.append(index)
                elif tokens[index] in running.stop_ids:
                    sampled.ends.append(index)
            hashes.append(running.chain.extend(packed[ID_BYTES * begin : ID_BYTES * end]))
        sampled.hashes = b"".join(hashes)
        return sampled
