"""A client's request in the form that the frontend passes to the scheduler: ids, no text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.bounds import INT32_MAX, INT64_MAX, Count, Int64, TokenId
from setpoint.core.prefix_digest import grown
from setpoint.core.sampling import SamplingParams

MAX_LOGPROBS = 1000
"""Most tokens per position whose logprobs a request may ask for. The limit holds for the likeliest
tokens and for tokens named by id, separately."""

MAX_CONSTRAIN_AFTER = 32
"""Most token ids in ``RequestOptions.constrain_after``."""

SAMPLING_MASK = "sampling_mask"
"""A token fact: the tokens that a token was drawn from."""

MAX_SAMPLING_MASK = 1024
"""Most tokens in a sampling mask, and the largest top_k of a request that asks for it."""

LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ids = npt.NDArray[np.int32]
else:  # numpy is imported with the first ids: what reads logs and figures of a server needs none
    Ids = Any
"""Token ids or page numbers, little-endian int32, one dimension."""

PoolingKind = Literal["last", "mean"]
"""Which hidden states of a prompt become its embedding: the last token's, or the mean over all
tokens."""


def pack_ids(ids: Iterable[int] | Ids) -> bytes:
    """Token ids as little-endian int32 bytes. At 32k tokens a list would cost milliseconds on the
    wire; bytes do not."""
    import numpy as np

    array = ids if isinstance(ids, np.ndarray) else np.fromiter(ids, np.int32)
    return array.astype("<i4", copy=False).tobytes()


def unpack_ids(data: bytes) -> Ids:
    """The inverse of :func:`pack_ids`: a read-only view, no copy."""
    import numpy as np

    return np.frombuffer(data, dtype="<i4")


class LogprobOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which logprobs a request wants in addition to those of its output tokens."""

    start: Annotated[int, Meta(ge=-1, le=INT32_MAX)] = -1
    """First prompt position whose logprob is wanted; -1: logprobs of outputs only. Prefix matching
    stops at this position."""
    top: LogprobCount = 0
    """How many of the likeliest tokens are wanted at every reported position."""
    ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_LOGPROBS)] = ()
    """Token ids whose logprobs are wanted at every reported position."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client asks for besides tokens and their sampling. An API makes it from the body; it
    passes unchanged through Request and Admit to whoever fulfils it, so a new option touches only
    the API that reads it and the place that fulfils it."""

    stream: bool = False
    """False lets the scheduler hold tokens back and send them in larger groups."""
    logprobs: LogprobOptions | None = None
    namespace: str = ""
    """Cache namespace (from SGLang's extra_key and cache_salt); different namespaces never share a
    prefix."""
    priority: Int64 | None = None
    routing_key: str = ""
    """Under the routing-key policy, requests with the same key run together."""
    routed_dp_rank: Count | None = None
    """The data-parallel rank whose engine is to have the request as long as it is ready; None: the
    frontend chooses."""
    bootstrap: Bootstrap | None = None
    """The bootstrap room in which a prefill and a decode server compute this request together;
    None: one server computes it alone."""
    pooling: PoolingKind | None = None
    """Set when an embedding is wanted instead of text. ``sampling.max_new_tokens`` is 0 then, and
    the step that computes the last prompt token ends the request."""
    hidden_states: bool = False
    """Return the hidden state of every token that is computed, the prompt's included. No part of
    the prompt is taken from the cache then, because the cache keeps no hidden states."""
    output_hidden_states: bool = False
    """Return, for each output token, the hidden state that it was sampled from."""
    constrain_after: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_CONSTRAIN_AFTER)] = ()
    """Consecutive token ids after whose first occurrence in the outputs the constraint of the
    sampling parameters begins (the end of the reasoning); empty: it holds from the first output."""
    token_facts: tuple[str, ...] = ()
    """Names of further facts that are wanted about each output token; each fact is a list of
    numbers (``engine.sampling.facts``)."""

    @property
    def wants_hidden_states(self) -> bool:
        return self.hidden_states or self.output_hidden_states

    @property
    def picked_ids(self) -> tuple[int, ...]:
        """The token ids whose logprobs are wanted at every reported position."""
        return () if self.logprobs is None else self.logprobs.ids

    def without_reports(self) -> RequestOptions:
        """The options of a request that wants nothing but tokens."""
        return msgspec.structs.replace(self, logprobs=None, token_facts=())

    @property
    def takes_every_step(self) -> bool:
        """Whether every output token needs a step of its own, in which something about it is
        recorded."""
        return self.logprobs is not None or self.wants_hidden_states or bool(self.token_facts)


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate or embed (``n > 1`` becomes n requests in the frontend). SGLang:
    TokenizedGenerateReqInput."""

    rid: str
    prompt_ids: bytes
    """Packed by :func:`pack_ids`; never empty."""
    sampling: SamplingParams
    seed: Annotated[int, Meta(ge=0, le=INT64_MAX)]
    """Seed of the counter-based generator: the client's ``sampling_seed``, or one that the frontend
    drew so that the request has the same result on every engine."""
    options: RequestOptions = RequestOptions()
    prior_output_ids: bytes = b""
    """Outputs that already exist (of a resumed request). They count as outputs for penalties,
    limits, usage and seeds."""
    was_accepted: bool = False
    """Whether an engine that has ended had it, so that no limit of the queue refuses it now."""
    digests: bytes = b""
    """The digests of the first blocks of the prompt and these outputs (``core.prefix_digest``), as
    far as somebody has needed them."""

    def prompt(self) -> Ids:
        return unpack_ids(self.prompt_ids)

    def routed_to(self, rank: int) -> Request:
        """This request, for the engine of a data-parallel rank."""
        options = msgspec.structs.replace(self.options, routed_dp_rank=rank)
        return msgspec.structs.replace(self, options=options)

    def with_digests(self) -> Request:
        """This request, with the digests of all its whole blocks."""
        ids = self.prompt_ids + self.prior_output_ids
        digests = grown(self.digests, ids, self.options.namespace)
        if len(digests) == len(self.digests):
            return self
        return msgspec.structs.replace(self, digests=digests)

    def prior_outputs(self) -> Ids:
        return unpack_ids(self.prior_output_ids)
