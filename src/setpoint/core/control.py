"""Control calls: what the frontend asks of an engine besides requests. Each has a struct for the
question and one for the answer, so that both planes and every reader agree on the fields.

A call carries an ``id``; a ``Reply`` (``core.messages``) brings the answer back under the same id.
An engine that cannot do what it was asked answers ``Refused``. An exception in a call fails that
call alone.
"""

from __future__ import annotations

import enum
from typing import Any, TypedDict

import msgspec

from setpoint.core.handover import HandoverCounts
from setpoint.core.moments import Moment
from setpoint.core.operations import MemoryPart, Operation
from setpoint.core.pool import PoolStats
from setpoint.core.settings import Settings


class GetState(msgspec.Struct, frozen=True, tag=True):
    """Answered by InternalState."""

    id: int


class GetMoments(msgspec.Struct, frozen=True, tag=True):
    """Answered by Moments."""

    id: int
    since: int = 0
    """Number of the first moment to return."""


class ListRequests(msgspec.Struct, frozen=True, tag=True):
    """Answered by RequestList."""

    id: int


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Empty the prefix cache, if no request is open. Answered by CacheFlush."""

    id: int


class OptionChange(msgspec.Struct, frozen=True):
    """An option's value before and after a change, as the user writes it."""

    option: str
    old: str | int | float | bool | None
    new: str | int | float | bool | None

    def __str__(self) -> str:
        return f"{self.option} {self.old} -> {self.new}"


class Change(msgspec.Struct, frozen=True, tag=True):
    """Use these settings from the next step on. The frontend has checked them. Answered by Done."""

    id: int
    settings: Settings
    """All settings after the change."""
    options: list[OptionChange]
    """The options whose values change."""
    by: str
    """Who asked for it."""
    why: str
    """The reason that they gave; may be empty."""


class PauseMode(enum.StrEnum):
    """What a pause does to the requests that are open."""

    ABORT = "abort"  # all of them end
    RETRACT = "retract"  # running ones give up their memory and go back to the queue
    IN_PLACE = "in_place"  # running ones keep their memory


PAUSED = "Aborted, because generation was paused."
"""What the requests are told that a pause ends."""
PAUSE_FIRST = 'Pause first (POST /pause_generation with {"mode": "retract"}), or wait'
"""What to do about open requests that an order does not allow; no request ends."""


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Plan no further step until Continue. Answered by PauseDone, once the results of the steps in
    flight are taken and the open requests are dealt with. Requests that arrive while the engine is
    paused wait in the queue."""

    id: int
    mode: PauseMode


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Plan no further step until Continue, if no step could be planned anyway: no request is open,
    or all wait for the end of a pause, which keeps its mode. Answered by Done; refused if requests
    are open otherwise."""

    id: int
    flushes: bool
    """Refuse also if paused requests keep memory."""


class Continue(msgspec.Struct, frozen=True, tag=True):
    """End a Pause or a Hold; does nothing without one. Answered by Done."""

    id: int


class Operate(msgspec.Struct, frozen=True, tag=True):
    """Carry an operation out, between two steps. Answered by OperationDone."""

    id: int
    operation: Operation


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The answer to any call that cannot be carried out now."""

    error: str
    """Why, in a sentence for the client."""
    status_code: int = 400
    """The HTTP status: 400 if nothing was done, 500 for an unexpected exception."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The call has been carried out, and there is nothing to report."""


class PauseDone(msgspec.Struct, frozen=True, tag=True):
    """The engine is paused."""

    num_paused_reqs: int
    """Open requests that wait for the end of the pause."""


class OperationDone(msgspec.Struct, frozen=True, tag=True):
    num_paused_reqs: int
    """Open requests that wait for the end of a pause; 0 without one."""
    path: str = ""
    """The file that the operation writes, if it writes one."""


class CacheFlush(msgspec.Struct, frozen=True, tag=True):
    is_flushed: bool
    """False: requests are open, and the cache is as it was."""
    num_tokens: int
    """Tokens that were in the cache; 0 if it is not flushed."""


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache tiers of an engine have done since its start."""

    backend: str | None
    """The storage in use; None: there is none."""
    place: str = ""
    """Where the storage is; without passwords."""
    has_tier: bool = True
    """Whether there is a tier: the only storage may have been detached."""
    off: str = ""
    """Why nothing is loaded any more; empty if it is."""
    saves_selectively: bool = msgspec.field(default=False, name="is_thrifty")
    """Whether only blocks that were used twice are saved, because saving has not paid."""
    num_blocks: int = 0
    """Blocks in all tiers, also of others who use them."""
    num_bytes: int = 0
    loaded_tokens: int = 0
    saved_tokens: int = 0
    load_s: float = 0.0
    """Seconds of lookups and loads, in threads beside the loop, as are those of saves."""
    save_s: float = 0.0
    earned_s: float = 0.0
    """What it would have taken to compute what was loaded."""
    missed_tokens: dict[str, int] = {}
    """Reason -> tokens that tiers had, or might have had, and that were computed."""
    dropped_tokens: dict[str, int] = {}
    """Reason -> tokens that were not saved."""
    lost_blocks: dict[str, int] = {}
    """"damaged", "evicted" or "refused" -> blocks."""
    loaded_by_tier: dict[str, int] = {}
    """"host" or "storage" -> tokens that were loaded from it."""
    loaded_bytes: int = 0
    saved_bytes: int = 0
    age_s: float = 0.0
    """Seconds since the tiers were opened."""
    num_clearings: int = 0
    """Orders to clear the storage that are still carried out."""
    clear_error: str = ""
    """Why the last such order failed; empty if it did not."""


class Moments(msgspec.Struct, frozen=True, tag=True):
    first: int
    """Number of the first moment here: a larger one than was asked for if older moments are no
    longer kept."""
    moments: list[Moment]
    """Finished moments, without gaps."""
    tiers: TierState | None = None
    """None without cache tiers."""


class RequestList(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Where requests are. Sequences are named by their numbers, at most ``listing.MAX_LISTED`` of
    each kind; the counts include those that are not named."""

    preparing: list[int]
    queue: list[int]
    """The sequences of the queue, in the order of arrival."""
    retracted: list[int]
    """The sequences of the queue that have run before."""
    running: list[int]
    outputs: dict[int, int]
    """Sequence -> number of output tokens, for the named sequences that have any. The frontend gets
    most of them later if it does not stream."""
    prefilling: int | None
    """The sequence whose prompt is computed in chunks."""
    why: str | None
    """Why the head of the queue waits (``core.records.AdmissionRefusal``); None if nothing waits,
    or no step has been planned since."""
    paused: PauseMode | None
    num_preparing: int
    num_queued: int
    num_running: int


class Totals(msgspec.Struct):
    """Sums since the engine started, or over one moment."""

    steps: dict[str, int] = {}
    """Number of steps by the way they ran."""
    forward_s: float = 0.0
    sample_s: float = 0.0
    prompt_tokens: int = 0
    """Prompt tokens that were computed, not found in the cache."""
    cached_tokens: int = 0
    output_tokens: int = 0
    refusals: dict[str, int] = {}
    """Reason -> how often it made a request wait, counted once per request and step."""
    admissions: int = 0
    """Includes admissions after a retraction."""
    retracted: int = 0
    preempted: int = 0
    clipped: int = 0
    """Requests whose max_new_tokens was lowered."""
    ended: dict[str, int] = {}
    """Requests by how they ended: stop, length, abort, or the HTTP status they were refused or
    failed with."""
    sends_failed: int = 0
    pools_rebuilt: int = 0
    queue_s: float = 0.0
    """Seconds from arrival to first admission, summed over ended requests that were admitted."""
    first_token_s: float = 0.0
    """Seconds from arrival to first token, summed over ended requests with outputs."""
    decode_s: float = 0.0
    """Seconds from first token to end, summed over the same requests."""


class TurnSums(msgspec.Struct):
    """Seconds of the loop's turns since the engine started (see ``core.records.TurnDone``)."""

    num_steps: int = 0
    turn_s: float = 0.0
    plan_s: float = 0.0
    model_s: float = 0.0
    link_s: float = 0.0


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Rates and totals of the whole engine."""

    last_gen_throughput: float = 0.0
    """Generated tokens per second, as in the last 'Decode batch' line."""
    cache_hit_rate: float = 0.0
    """Share of all prompt tokens so far that the prefix cache supplied, 0 to 1."""
    new_token_ratio: float = 0.0
    totals: Totals = msgspec.field(default_factory=Totals)
    fallbacks: list[str] = []
    """What does not run as it was asked for, each with its reason."""


class HistogramCounts(TypedDict):
    """A histogram in a message (``observe.series.Histogram``)."""

    counts: list[int]
    sum: float


class MetricsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's part of ``/metrics``: series -> label value -> number; the label value is "" for
    a series without a label."""

    counters: dict[str, dict[str, float]] = {}
    gauges: dict[str, dict[str, float]] = {}
    histograms: dict[str, dict[str, HistogramCounts]] = {}


class MemoryUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the engine's large parts, in GiB."""

    weight: float = 0.0
    kvcache: float = 0.0
    graph: float = 0.0


class RecordingState(msgspec.Struct, frozen=True, kw_only=True):
    num_records: int
    num_bytes: int
    ended: str | None
    """Why the recording has ended; None while it goes on."""


class ExpertLoads(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens the experts of a mixture have got."""

    num_layers: int
    """Layers with experts."""
    num_experts: int
    """Experts of a layer."""
    num_tokens: int
    """Since the weights were loaded: a token counts once for each expert that it has used in each
    layer."""
    num_unused: int
    """Experts of all layers together that have got no token."""
    balancedness: float
    """Mean / max of the tokens of a layer's experts, averaged over the layers: 1 if all get the
    same, 1 / num_experts if one gets all."""
    rank_tokens: list[int]
    """The tokens of each rank's experts since these were placed; one number if every rank has a
    part of every expert."""
    eplb_balancedness: float
    """The same as ``balancedness``, of a layer's ranks since the experts were placed."""
    num_rebalances: int
    """How often experts were placed anew (--enable-eplb)."""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The part of InternalState that the scheduler does not know: what the readers of the engine's
    records have gathered, and its memory."""

    figures: EngineFigures = EngineFigures()
    turn_times: dict[str, TurnSums] = {}
    """Sums over the turns with a prefill step ("prefill") and over the others ("decode")."""
    metrics: MetricsReport | None = None
    """None without --enable-metrics."""
    memory_usage: MemoryUsage = MemoryUsage()
    recording: RecordingState | None = None
    """None if nothing is recorded."""
    experts: ExpertLoads | None = None
    """None for a model without experts."""
    tiers: TierState | None = None
    """None without cache tiers."""


class InternalState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The state of one engine between two steps (an entry of SGLang's ``internal_states``)."""

    num_running: int
    num_queued: int
    """Requests that do not run yet, including those in preparation."""
    num_preparing: int
    """Requests that wait for their grammar, or for a part of their prompt to be loaded."""
    num_retracted: int
    """Requests in the queue that have run before."""
    num_paused_reqs: int
    """Open requests that wait for the end of a pause; 0 without one."""
    paused: PauseMode | None
    released: list[MemoryPart]
    """Parts of the memory that were given back."""
    num_pending_tokens: int
    """Prompt tokens that wait to be computed. All tokens of waiting requests count, because their
    prefixes have not been matched yet."""
    num_running_tokens: int
    """Tokens of the running sequences, outputs included."""
    running_per_key: list[int]
    """For each routing key, how many running sequences have it; those without a key do not
    count."""
    open_per_key: list[int]
    """The same of running and queued sequences together."""
    pool: PoolStats
    settings: Settings
    num_loading: int = 0
    """The sequences in preparation that wait for nothing but their prompt."""
    report: EngineReport = EngineReport()
    handover: HandoverCounts | None = None
    """Set on prefill and decode servers."""

    @property
    def num_routing_keys(self) -> int:
        """Different routing keys among the running sequences."""
        return len(self.running_per_key)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue proper, without those in preparation."""
        return self.num_queued - self.num_preparing

    @property
    def is_busy(self) -> bool:
        """Whether requests are open that are not held up by a pause."""
        return bool(self.num_queued or self.num_running) and self.paused is None

    @property
    def utilization(self) -> float:
        """How full the engine is, 0 to 1: the share of the KV pool or of the slots in use,
        whichever is larger."""
        return max(self.pool.usage, self.num_running / self.settings.max_running_requests)


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine reports once, when it can take requests; ``/server_info`` shows it."""

    accelerator: str | None = None
    """Name of the GPU; None on CPUs."""
    max_total_num_tokens: int
    max_running_requests: int
    max_req_len: int = 0
    max_req_input_len: int
    """Prompts of this many tokens or more do not fit the engine."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    available_bytes: int = 0
    """Memory of the device that is still free."""
    weights: str = ""
    """The format in which the weights are kept."""
    model_impl: str = ""
    kernels: str = ""
    linear_layers: str = ""
    attention: str = ""
    kernel_level: str = ""
    kernel_choices: str = ""
    kernels_emulated: bool = False
    decisions: list[dict[str, Any]] = []
    """How the options were resolved that only the engine could resolve (``config.decisions``)."""
    phases: dict[str, float] = {}
    """Phase of the start -> seconds."""


Call = (
    GetState | GetMoments | ListRequests | FlushCache | Change | Pause | Hold | Continue | Operate
)
Answer = (
    Refused | Done | PauseDone | OperationDone | CacheFlush | Moments | RequestList | InternalState
)
