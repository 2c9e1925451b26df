"""The scheduler's state (queue, running set, slots, steps in flight) and the few operations that
keep it consistent. Planning (``prefill``, ``decode``) and the life of a request (``scheduler``)
change it only through these operations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from setpoint.core.control import PauseMode
from setpoint.core.handover import HandoverCounts
from setpoint.core.messages import Finish, TokenEvent
from setpoint.core.operations import MemoryPart
from setpoint.core.pagerows import CacheCosts
from setpoint.core.plan import StepPlan
from setpoint.core.preparation import Need, Preparer
from setpoint.core.records import AdmissionRefusal, Observer, Outcome
from setpoint.core.settings import Settings
from setpoint.core.transfers import Mover
from setpoint.scheduler.cache.manager import KVCache
from setpoint.scheduler.conservativeness import NewTokenRatio
from setpoint.scheduler.emit import request_done, token_event
from setpoint.scheduler.holdings import Holdings
from setpoint.scheduler.preparing import Preparing
from setpoint.scheduler.queue import WaitingQueue
from setpoint.scheduler.scheduler_config import SchedulerConfig
from setpoint.scheduler.sequence import MAX_FORCED, Sequence, Status
from setpoint.scheduler.tiers import Tiers
from setpoint.scheduler.transfers import Transfers


@dataclass(slots=True)
class StepDraft:
    """A step from the beginning of its planning until its result is back: its sequences, and the
    numbers that its StepDone will report."""

    settings: Settings
    """The settings that the step is planned under."""
    plan: StepPlan | None = None
    """Set when the plan is complete."""
    seqs: list[Sequence] = field(default_factory=list)
    """The step's sequences, in the plan's row order."""
    num_new_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefill_rows: int = 0
    num_decode_rows: int = 0
    num_forced: int = 0
    num_pairs: int = 0
    num_behind: int = 0
    num_new_seqs: int = 0
    num_running: int = 0
    num_queued: int = 0
    num_preparing: int = 0
    num_pending_tokens: int = 0
    handover: HandoverCounts | None = None
    hold: bool = False
    """Nothing may be planned this turn: a preemption waits for the steps in flight."""
    refusals: dict[AdmissionRefusal, int] = field(default_factory=dict)
    ends: dict[int, Finish] = field(default_factory=dict)
    """seq_id -> how a sequence ends whose grammar allows no token in this step; written when the
    step's masks are made."""

    def add(self, seq: Sequence, *, computed: int, samples: int) -> None:
        """Count a planned row of this sequence, which computes its ``computed`` latest scheduled
        tokens and may bring back ``samples`` further ones."""
        behind = seq.num_scheduled - computed
        self.num_behind += behind
        self.num_pairs += computed * behind + computed * (computed + 1) // 2
        seq.inflight_steps += 1
        seq.inflight_samples += samples
        self.seqs.append(seq)


class State:
    """Every living sequence is in exactly one of ``preparing``, ``queue``, ``running``, ``handing``
    and ``draining``."""

    def __init__(
        self,
        config: SchedulerConfig,
        settings: Settings,
        cache: KVCache,
        observer: Observer,
        preparer: Preparer | None = None,
        mover: Mover | None = None,
    ) -> None:
        self.config = config
        self.settings = settings
        """The settings for the steps to come; written by ``Scheduler.change``."""
        self.cache = cache
        self._observer = observer
        self.costs = CacheCosts(cache.row, cache.page_size, _span(config, settings))
        """Based on the chunk size at the start: the frontend refuses a larger one, for which no
        memory was planned."""
        self.longest = self.costs.longest(cache.total_tokens)
        """Tokens of the longest sequence that finishes alone in the pool."""
        self.holdings = Holdings(cache)
        self.ratio = NewTokenRatio(config.ratio, settings.conservativeness)
        self.transfers = Transfers(cache, observer)
        self.preparing = Preparing(preparer, observer)
        self.inflight: deque[StepDraft] = deque()
        self.tiers = self._tiers(mover)  # None without cache tiers
        self.queue = WaitingQueue()
        self.running: dict[int, Sequence] = {}
        """Admitted and not finished, in admission order; the sequence in mid-prefill included."""
        self.handing: dict[int, Sequence] = {}
        """Computed, and waiting for the decode server to have their pages, without slot or memory
        of their own."""
        self.end_offer: Callable[[Sequence], None] = lambda seq: None
        """Called with each sequence that ends, wherever it is; written by ``PrefillSide``."""
        self.draining: dict[int, Sequence] = {}
        """Finished, but in a plan in flight: slot and pages stay held until its result is back."""
        self.chunking: Sequence | None = None
        """The one sequence in mid-prefill."""
        self.by_id: dict[int, Sequence] = {}
        """The sequences in ``preparing``, ``queue``, ``running`` or ``handing``."""
        self.slots = list(range(config.num_slots - 1, -1, -1))
        """Free slots; the lowest is taken first at the start."""
        self.releases: list[int] = []
        """Slots given up since the last plan."""
        self.num_processed = 0
        """Prompt tokens planned since the start."""
        self.now = 0.0
        """Clock seconds of the turn or of the latest commit. Planning knows no other time."""
        self.pause: PauseMode | None = None
        """The mode of the pause in force; written by ``PauseController``, as are the next two."""
        self.released: set[MemoryPart] = set()
        """Parts of the engine's memory that are given back at present."""
        self.still_since = 0.0
        """Clock seconds when the present standstill began."""
        self.standing_refusal: AdmissionRefusal | None = None
        """Why admission is pointless until a running or waiting sequence ends, or one is retracted
        (SGLang: batch_is_full)."""
        self.largest_chunk: int | None = None
        """Most prompt tokens of a step since one was lost. Written by ``LostSteps``."""
        self.head_refusal: AdmissionRefusal | None = None
        """Why the head of the queue was refused last; written by ``PrefillPlanner.refuse``."""

    def _tiers(self, mover: Mover | None) -> Tiers | None:
        config, cache = self.config.tiers, self.cache
        if config is None or mover is None or not cache.enabled:
            return None
        tiers = Tiers(
            config,
            mover,
            cache,
            self.transfers,
            self.preparing,
            self._observer,
            self._newest_step,
        )
        self.preparing.cancel[Need.CACHE] = tiers.cancel
        return tiers

    def _newest_step(self) -> int:
        if not self.inflight:
            return -1
        plan = self.inflight[-1].plan
        assert plan is not None, "nothing is saved while a step is planned"
        return plan.step_id

    @property
    def chunk(self) -> int | None:
        """Most prompt tokens of a step; None: prompts are not divided into chunks."""
        limits = [self.settings.chunked_prefill_size, self.largest_chunk]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def available_tokens(self) -> int:
        """Pool tokens that an allocation could get: those that are free, and those that are cached
        and not locked."""
        return self.cache.free_tokens + self.cache.evictable_tokens

    @property
    def num_free_slots(self) -> int:
        """Number of sequences that may be admitted; negative if the limit was lowered below the
        number that run."""
        return len(self.slots) - self.config.num_slots + self.settings.max_running_requests

    @property
    def num_pending_tokens(self) -> int:
        """Tokens of the waiting sequences, plus the remainder of the prompt in mid-prefill."""
        left = (
            len(self.chunking.ids) - self.chunking.num_scheduled if self.chunking is not None else 0
        )
        return self.queue.num_tokens + left

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits, runs or is in flight. Sequences may be in preparation."""
        return not (self.queue or self.running or self.draining or self.inflight)

    @property
    def is_settled(self) -> bool:
        """Whether the engine is idle and no transfer holds pages."""
        return self.is_idle and not self.transfers

    @property
    def stands_still(self) -> bool:
        """Whether nothing may be planned: the engine is paused, or has given memory back."""
        return self.pause is not None or bool(self.released)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing can be planned and no result is due until a message arrives."""
        return self.is_idle or (self.stands_still and not self.inflight)

    @property
    def num_paused(self) -> int:
        """Number of requests that wait for the end of a standstill."""
        return len(self.by_id) if self.stands_still else 0

    @property
    def can_flush(self) -> bool:
        """Whether no sequence holds memory, nor could take some before the next message."""
        return self.is_idle or (self.is_at_rest and not (self.running or self.draining))

    @property
    def num_decoding(self) -> int:
        """Number of running sequences that are past their prompt."""
        return len(self.running) - (self.chunking is not None)

    def enqueue(self, seq: Sequence) -> None:
        """Put a sequence at the end of the queue."""
        seq.since, seq.arrived_at = self.now, self.num_processed
        self.queue.append(seq)

    def reserve_place(self, seq: Sequence) -> None:
        """Reserve a place at the end of the queue for a sequence that has needs."""
        seq.since, seq.arrived_at = self.now, self.num_processed
        self.queue.reserve(seq)

    def put_off(self, seq: Sequence) -> None:
        """Let a running sequence wait for its grammar: it gives up memory and slot, and gets a
        place at the end of the queue, as if it were retracted.

        Contract: no step in flight contains the sequence.
        """
        self._give_up(seq, publish=True)
        seq.forced = []
        self.preparing.resume(seq)
        self.reserve_place(seq)

    def enqueue_if_ready(self, seq: Sequence) -> None:
        """Put a sequence in its place in the queue if it has no needs any more."""
        if not seq.needs:
            self.queue.insert(seq)
            self.standing_refusal = None  # it may fit, and be ahead of the one that did not

    def flush(self) -> int:
        """Empty the prefix cache, of which no sequence may hold a part. Returns the number of pool
        tokens that became free."""
        num_tokens = self.cache.flush()
        self.transfers.flush()
        if self.tiers is not None:
            self.tiers.flush()
        return num_tokens

    def start(self, seq: Sequence) -> None:
        """Move a sequence from the queue into a free slot."""
        self.queue.remove(seq)
        seq.slot = self.slots.pop()
        seq.status = Status.RUNNING
        if seq.admitted_at is None:
            seq.admitted_at = self.now
        seq.since = self.now
        self.running[seq.seq_id] = seq

    def end(
        self,
        seq: Sequence,
        finish: Finish,
        *,
        outcome: Outcome = "aborted",
        preparation_s: float = 0.0,
    ) -> TokenEvent:
        """Finish a sequence that has not ended. Its memory and slot are released once no step in
        flight contains it. Returns its last event.

        outcome, preparation_s: for the record of its preparation, if it is in preparation.
        """
        seq.finish = finish
        del self.by_id[seq.seq_id]
        self.end_offer(seq)
        if seq.status is Status.PREPARING:
            self.preparing.remove(seq, outcome, preparation_s)
        elif seq.status is Status.HANDING:
            del self.handing[seq.seq_id]
        elif seq.status is Status.WAITING:
            self.queue.remove(seq)
            self.standing_refusal = None  # this may be the one that did not fit
        else:
            self._leave_running(seq)
            self.draining[seq.seq_id] = seq
            self.release_if_idle(seq)
        seq.status = Status.FINISHED
        return self.last_event(seq)

    def last_event(self, seq: Sequence) -> TokenEvent:
        """The last event of a sequence whose ``finish`` is set. Also emits its RequestDone."""
        event = token_event(seq, self.now)
        self._observer.on(request_done(seq, self.now))
        return event

    def keep_handing(self, seq: Sequence, finish: Finish) -> None:
        """Take memory and slot from a sequence that has got its last token, and keep it until its
        pages have moved.

        Contract: no step in flight contains the sequence.
        """
        assert seq.inflight_steps == 0
        seq.finish = finish  # so that nothing more is planned for it
        self._leave_running(seq)
        self._release(seq)
        seq.status = Status.HANDING
        self.handing[seq.seq_id] = seq

    def lose_newest_step(self) -> None:
        """Take the newest step in flight back, which must be the only one: every running sequence
        is retracted, or waits for its grammar if that is late, and nothing stays cached."""
        step = self.inflight.pop()
        assert not self.inflight, "the loop takes all results first"
        assert step.plan is not None
        if self.tiers is not None:
            self.tiers.lose_saves()
        for seq, samples in zip(step.seqs, step.plan.rows.samples.tolist(), strict=True):
            seq.inflight_steps -= 1
            seq.inflight_samples -= samples
        for seq in self.draining.values():
            self.holdings.release(seq, publish=False)
            self._free_slot(seq)
        self.draining.clear()
        for seq in list(self.running.values()):
            if seq.is_late:
                self.put_off(seq)
            else:
                self.send_back(seq)
        self.flush()

    def release_if_idle(self, seq: Sequence) -> None:
        """Release a finished sequence once its last step in flight is back."""
        if seq.inflight_steps == 0:
            del self.draining[seq.seq_id]
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """Take memory and slot from a finished sequence, and leave what it has computed to the
        cache and its tiers."""
        num_computed = seq.num_scheduled
        self.holdings.release(seq, publish=True)
        self._free_slot(seq)
        if self.tiers is not None:
            self.tiers.keep(seq, num_computed)

    def send_back(self, seq: Sequence) -> None:
        """Retract a sequence: it gives up memory and slot, and joins the end of the queue with the
        outputs that it has.

        Contract: no step in flight contains the sequence.
        """
        self._give_up(seq, publish=False)
        self.enqueue(seq)

    def _give_up(self, seq: Sequence, *, publish: bool) -> None:
        """Take memory and slot from a sequence. publish: leave what it has computed in the
        cache."""
        self._leave_running(seq)
        self.holdings.release(seq, publish=publish)
        self._free_slot(seq)
        seq.num_retractions += 1
        seq.prompt_logprobs = []

    def _leave_running(self, seq: Sequence) -> None:
        del self.running[seq.seq_id]
        if self.chunking is seq:
            self.chunking = None
        self.standing_refusal = None

    def _free_slot(self, seq: Sequence) -> None:
        self.slots.append(seq.slot)
        self.releases.append(seq.slot)
        seq.slot = -1
        self.standing_refusal = None


def _span(config: SchedulerConfig, settings: Settings) -> int:
    """The most tokens between the first one that is still to be computed and the last one that is
    planned: a chunk, or what the steps in flight may bring back."""
    in_flight = (config.depth + 1) * max(config.max_tokens_per_row, 1 + MAX_FORCED)
    return max(settings.chunked_prefill_size or config.max_req_len, in_flight)
