"""What is loaded from stores into the prefix cache, and what is saved to them
(docs/decisions/0073-cache-tiers.md).

A request whose prompt lacks much in the pool waits while a mover looks its blocks up and loads them
(``Need.CACHE``); a request that has ended leaves its blocks to be saved. Works on tokens and page
numbers: it does not know stores, bytes or identities. It decides by counts and by measured seconds,
which all come from recorded inputs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from setpoint.core.messages import PagesMoved, PrefixFound
from setpoint.core.prefix_digest import grown, split
from setpoint.core.preparation import Need
from setpoint.core.records import Fallback, Observer, Outcome
from setpoint.core.request import Ids, pack_ids
from setpoint.core.transfers import Direction, Mover, Transfer
from setpoint.scheduler.cache.manager import KVCache
from setpoint.scheduler.preparing import Preparing
from setpoint.scheduler.scheduler_config import TierConfig
from setpoint.scheduler.sequence import Sequence
from setpoint.scheduler.transfers import Transfers

STORED = -1
"""Instead of a count of uses: the block is stored, or is being stored."""
MAX_KNOWN = 1 << 17
"""Most blocks whose uses are remembered."""
MAX_WAITING_SAVES = 4096
MAX_LOADS, MAX_SAVES = 4, 2
"""Most transfers at a time. More would not be faster: each direction has one thread."""
SHARE = 0.5
"""Largest share of the pool that loads may hold, and that saves may lock."""
GRACE_S = 0.25
"""How long a load that was stopped may take to say how far it came."""
LOOKUP_S = 1.0
"""How long a request waits to hear what is stored."""
MAX_LATE = 3
"""After so many lookups or loads in a row without an answer in time, nothing is loaded any more."""
ALLOWED_LOSS_S = 20.0
"""Seconds of saving that loads may not have earned back before only blocks are saved that have been
used twice."""
RETRY_EVERY = 16
"""Every so many loads that seem slower than computing, one is tried all the same."""
SMOOTH = 0.2
"""Weight of a new measurement in a running mean."""


@dataclass(slots=True)
class _Wait:
    """A sequence that waits for its prompt."""

    seq: Sequence
    keys: list[bytes]
    """Digests of the blocks of its prompt that may be matched."""
    deadline: float
    """When the present lookup or load is given up."""
    transfer_id: int | None = None
    is_stopped: bool = False
    found: int = 0
    """Number of tokens that stores have."""
    lookup_s: float = 0.0


@dataclass(slots=True)
class TierTotals:
    """Sums since the start."""

    loaded_tokens: int = 0
    saved_tokens: int = 0
    load_s: float = 0.0
    save_s: float = 0.0
    earned_s: float = 0.0
    """What it would have taken to compute what was loaded."""
    missed: dict[str, int] = field(default_factory=dict)
    """Reason -> tokens that stores had, or might have had, and that are computed."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> tokens that were not saved."""


class Tiers:
    """Loads and saves for one scheduler. ``State`` and ``Scheduler`` call it."""

    def __init__(
        self,
        config: TierConfig,
        mover: Mover,
        cache: KVCache,
        transfers: Transfers,
        preparing: Preparing,
        observer: Observer,
        newest_step: Callable[[], int],
    ) -> None:
        """newest_step: returns the number of the newest step whose result is not back; -1 if there
        is none."""
        self._config, self._mover, self._newest_step = config, mover, newest_step
        self._cache, self._transfers, self._preparing = cache, transfers, preparing
        self._observer = observer
        self.totals = TierTotals()
        self.off = ""
        """Why nothing is loaded any more; empty if it is."""
        self._waits: dict[int, _Wait] = {}
        """seq_id -> wait, in order of arrival."""
        self._loading: dict[bytes, int] = {}
        """Digest of a block that is being loaded -> transfer."""
        self._known: OrderedDict[bytes, int] = OrderedDict()
        """Digest of a block -> how often it was used, or STORED."""
        self._to_save: deque[tuple[Ids, str, int, list[bytes]]] = deque()
        """(tokens, namespace, first block, digests of the blocks) to save, when there is room for
        the transfer."""
        self._held: deque[tuple[int, Transfer]] = deque()
        """Saves whose pages a step may still be writing: (the newest such step, save). Another
        sequence may have planned to compute what is to be saved."""
        self.saves_selectively = False
        """Whether only blocks are saved that were used twice, because saving has not paid."""
        self._prefill_rate = self._load_rate = 0.0
        """Tokens per second, running means; 0: not known yet."""
        self._num_late = self._num_slower = 0
        self.ready: list[Sequence] = []
        """Sequences that wait no longer; ``State`` takes them."""

    # ------------------------------------------------------------------ loading

    def wants(self, seq: Sequence, ids: Ids) -> bool:
        """Whether to look up the prompt of a sequence, of which ``ids`` may be matched."""
        if self.off:
            return False
        block = self._config.block
        whole = len(ids) // block * block
        namespace = seq.request.options.namespace
        return whole >= self._config.threshold and (
            whole - self._cache.peek(ids, namespace) >= self._config.threshold
        )

    def start(self, seq: Sequence, ids: Ids, now: float) -> None:
        """Look up the prompt of a sequence, which waits for it."""
        digests = seq.digests(len(ids), self._config.block)
        self._waits[seq.seq_id] = _Wait(seq, split(digests), now + LOOKUP_S)
        self._preparing.begin(seq, Need.CACHE)
        self._mover.look_up(seq.seq_id, digests)

    def cancel(self, seq_id: int) -> None:
        """The sequence has ended. A load goes on holding its pages until it has stopped."""
        wait = self._waits.pop(seq_id)
        if wait.transfer_id is not None:
            self._mover.cancel(wait.transfer_id)

    def found(self, message: PrefixFound) -> None:
        """Take the answer to a lookup; ``advance`` goes on from there."""
        wait = self._waits.get(message.seq_id)
        if wait is None or wait.found:
            return
        self._num_late = 0
        wait.found, wait.lookup_s = message.num_tokens, message.seconds
        self.totals.load_s += message.seconds
        num_found = wait.found // self._config.block
        for key in wait.keys[:num_found]:
            self._remember(key, STORED)
        for key in wait.keys[num_found:]:
            if self._known.get(key) == STORED:
                del self._known[key]  # it was removed, or cannot be reached: save it again
        if not wait.found:
            self._finish(wait, "missed", message.seconds)
            return
        wait.deadline = float("inf")  # it waits for its turn

    def advance(self, now: float) -> None:
        """Begin what can begin: loads in the order of arrival, then saves."""
        if self._waits:
            for wait in list(self._waits.values()):
                if wait.found and wait.transfer_id is None:
                    self._try_load(wait, now)
        self._start_saves()

    def _try_load(self, wait: _Wait, now: float) -> None:
        ids, namespace = wait.seq.known_ids()[: wait.found], wait.seq.request.options.namespace
        have = self._cache.peek(ids, namespace)
        gain = wait.found - have
        if gain < self._config.threshold:
            self._finish(wait, "missed", wait.lookup_s)  # it is in the pool by now
            return
        if not self._pays(gain):
            self._miss("slower than computing", gain)
            self._finish(wait, "missed", wait.lookup_s)
            return
        if wait.keys[have // self._config.block] in self._loading:
            return  # another sequence loads the same
        held = self._num_tokens(Direction.LOAD)
        if self._num_open(Direction.LOAD) and (
            self._num_open(Direction.LOAD) >= MAX_LOADS
            or held + gain > SHARE * self._cache.total_tokens
        ):
            return
        transfer = self._transfers.reserve(
            self._config.place,
            ids,
            namespace,
            lambda reached, message: self._loaded(wait, reached, message),
            b"".join(wait.keys[: wait.found // self._config.block]),
        )
        if transfer is None:
            self._miss("no room in the pool", gain)
            self._finish(wait, "missed", wait.lookup_s)
            return
        wait.transfer_id = transfer.id
        wait.deadline = now + self._limit_s(gain)
        for key in wait.keys[transfer.start // self._config.block :]:
            self._loading[key] = transfer.id
        self._mover.load(transfer)

    def _limit_s(self, num_tokens: int) -> float:
        config = self._config
        match config.prefetch_policy:
            case "wait_complete":
                return float("inf")
            case "best_effort":
                return 0.0
            case _:
                return config.timeout_base_s + num_tokens / 1024 * config.timeout_per_ki_token_s

    def _pays(self, num_tokens: int) -> bool:
        """Whether loading is expected to be faster than computing, or is wanted anyway."""
        if (
            self._config.prefetch_policy == "wait_complete"
            or not self._prefill_rate
            or not self._load_rate
        ):
            return True
        if self._load_rate >= self._prefill_rate:
            return True
        self._num_slower += 1
        return self._num_slower % RETRY_EVERY == 0

    def _loaded(self, wait: _Wait, reached: int, message: PagesMoved) -> None:
        self._loading = {key: at for key, at in self._loading.items() if at != message.id}
        moved = message.num_tokens
        self.totals.load_s += message.seconds
        if moved and message.seconds > 0:
            self._load_rate = _mean(self._load_rate, moved / message.seconds)
        seq = wait.seq
        if reached:
            self.totals.loaded_tokens += moved
            if self._prefill_rate:
                self.totals.earned_s += moved / self._prefill_rate
        if message.why:
            missing = wait.found - max(reached, wait.found - moved if moved else 0)
            self._miss(message.why, max(missing, 0))
            for key in wait.keys[max(reached, 0) // self._config.block :]:
                self._known.pop(key, None)  # it may have to be saved again
        if self._waits.get(seq.seq_id) is wait:
            self._num_late = 0
            if reached:
                seq.num_loaded = moved
                seq.num_from_host = message.from_host
            self._finish(wait, "loaded" if reached and moved else "missed", message.seconds)

    def _finish(self, wait: _Wait, outcome: Outcome, seconds: float = 0.0) -> None:
        del self._waits[wait.seq.seq_id]
        self._preparing.end(wait.seq, Need.CACHE, outcome, seconds)
        self.ready.append(wait.seq)

    @property
    def next_deadline(self) -> float:
        """Clock seconds when ``expire`` has something to do; inf if never."""
        return min((wait.deadline for wait in self._waits.values()), default=float("inf"))

    def expire(self, now: float, *, could_run: bool) -> None:
        """Stop what takes too long. could_run: whether a sequence that joined the queue now would
        be admitted, which ends loads of best_effort if their sequence waits for nothing else."""
        for wait in list(self._waits.values()):
            if wait.deadline > now:
                continue
            if wait.transfer_id is None:
                self._late(wait, "looking up")
            elif wait.is_stopped:
                self._late(wait, "loading")
            elif self._config.prefetch_policy != "best_effort" or (
                could_run and wait.seq.needs == {Need.CACHE}
            ):
                self._mover.cancel(wait.transfer_id)
                wait.is_stopped, wait.deadline = True, now + GRACE_S

    def _late(self, wait: _Wait, doing: str) -> None:
        self._num_late += 1
        self._miss("timed out", len(wait.keys) * self._config.block)
        self._finish(wait, "timed_out")
        if self._num_late >= MAX_LATE and not self.off:
            self.off = f"{doing} took too long {MAX_LATE} times in a row"
            self._observer.on(Fallback("prompts are not loaded from the cache tiers", self.off))

    # ------------------------------------------------------------------ saving

    def keep(self, seq: Sequence, num_computed: int) -> None:
        """Save the whole blocks that a sequence has computed, as far as the write policy says: not
        at once, because a step may be planned at this moment. Those that another server has
        computed, that one saves."""
        finish, wanted = seq.finish, self._config.write_policy
        if finish is not None and (finish.status_code or 0) >= 500:
            return  # what a failed computation left is no use to others
        if wanted in ("write_back", "never"):
            return
        block, num_handed = self._config.block, seq.num_handed
        keys = split(seq.digests(num_computed, block))
        least = 2 if wanted == "write_through_selective" or self.saves_selectively else 1
        first, end = len(keys), 0
        for index, key in enumerate(keys[num_handed // block :], num_handed // block):
            uses = self._known.get(key, 0)
            if uses != STORED:
                uses += 1
                if uses >= least:
                    first, end = min(first, index), index + 1
            self._remember(key, uses)
        ids, namespace = seq.known_ids()[: end * block], seq.request.options.namespace
        self._enqueue(ids, namespace, first, keys[:end])

    def save_ahead(self) -> None:
        """Save what will be evicted first, in time, if the policy is write_back: once half of the
        pool is in use, because a single prompt may take a large part of it."""
        if self._config.write_policy != "write_back" or self._to_save:
            return
        share = self._cache.total_tokens // 2
        if self._cache.free_tokens > share:
            return
        block = self._config.block
        for ids, namespace in self._cache.oldest(share):
            keys = split(grown(b"", pack_ids(ids), namespace, block=block))
            first = next(
                (at for at, key in enumerate(keys) if self._known.get(key, 0) != STORED), len(keys)
            )
            self._enqueue(ids[: len(keys) * block], namespace, first, keys)

    def _enqueue(self, ids: Ids, namespace: str, first: int, keys: list[bytes]) -> None:
        """keys: digests of the blocks of ``ids``."""
        if first * self._config.block >= len(ids):
            return
        if len(self._to_save) >= MAX_WAITING_SAVES:
            self._drop("too many wait", len(ids) - first * self._config.block)
            return
        for key in keys[first:]:
            self._remember(key, STORED)
        self._to_save.append((ids, namespace, first, keys))

    def _start_saves(self) -> None:
        while self._to_save and self._num_open(Direction.SAVE) < MAX_SAVES:
            if not self._try_save():
                break

    def _try_save(self) -> bool:
        """Begin the next save. False if it has to wait."""
        ids, namespace, first, keys = self._to_save[0]
        block = self._config.block
        end = self._cache.peek(ids, namespace) // block * block
        if self._num_open(Direction.SAVE) and (
            self._num_tokens(Direction.SAVE) + end > SHARE / 2 * self._cache.total_tokens
        ):
            return False
        self._to_save.popleft()
        if end < len(ids):
            lost = len(ids) - max(end, first * block)
            self._drop("evicted before", lost)
            for key in keys[end // block :]:
                self._known.pop(key, None)
        if end <= first * block:
            return True
        transfer = self._transfers.hold(
            self._config.place,
            ids[:end],
            namespace,
            first * block,
            lambda reached, message: self._saved(end, first, keys[: end // block], message),
            b"".join(keys[: end // block]),
        )
        if transfer is not None:
            step_id = self._newest_step()
            if step_id < 0:
                self._mover.save(transfer)
            else:
                self._held.append((step_id, transfer))
        return True

    def note_step(self, step_id: int) -> None:
        """The result of this step is back, and of all before it."""
        while self._held and self._held[0][0] <= step_id:
            self._mover.save(self._held.popleft()[1])
        self._start_saves()

    def lose_saves(self) -> None:
        """End the saves that wait for a step, which is lost: nobody knows what it wrote."""
        while self._held:
            transfer = self._held.popleft()[1]
            self._transfers.end(PagesMoved(transfer.id, 0, why="a step was lost"))

    def _saved(self, end: int, first: int, keys: list[bytes], message: PagesMoved) -> None:
        self.totals.save_s += message.seconds
        self.totals.saved_tokens += message.num_tokens
        missing = end - first * self._config.block - message.num_tokens
        if missing > 0:
            self._drop(message.why, missing)
            # What a request uses again is tried again. The oldest of the pool would be tried again
            # at once, and without an end as long as nothing can be stored.
            if self._config.write_policy != "write_back":
                for key in keys[-(missing // self._config.block) :]:
                    self._known.pop(key, None)
        loss = self.totals.save_s + self.totals.load_s - self.totals.earned_s
        if not self.saves_selectively and loss > ALLOWED_LOSS_S and self._config.limits_loss:
            self.saves_selectively = True
            self._observer.on(
                Fallback(
                    "only blocks that were used twice are saved to the cache tiers",
                    f"saving took {self.totals.save_s:.1f} s and loading has saved"
                    f" {self.totals.earned_s:.1f} s",
                )
            )
        elif self.saves_selectively and loss < 0:
            self.saves_selectively = False

    # ------------------------------------------------------------------ both

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note how long a step took that computed prompts alone."""
        if num_tokens >= 32 and seconds > 0:
            self._prefill_rate = _mean(self._prefill_rate, num_tokens / seconds)

    def forget_stored(self) -> None:
        """Another storage is used from now on, or an empty one."""
        self._known.clear()
        self.off, self._num_late = "", 0

    def flush(self) -> None:
        """Forget what is to be saved: the pool's content is void."""
        assert not self._held, "a flush with a step in flight"
        self._to_save.clear()
        self._known.clear()

    def _num_open(self, direction: Direction) -> int:
        return self._transfers.num_open(direction, self._config.place)

    def _num_tokens(self, direction: Direction) -> int:
        return self._transfers.num_tokens(direction, self._config.place)

    def _remember(self, key: bytes, uses: int) -> None:
        self._known[key] = uses
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _miss(self, why: str, num_tokens: int) -> None:
        self.totals.missed[why] = self.totals.missed.get(why, 0) + num_tokens

    def _drop(self, why: str, num_tokens: int) -> None:
        self.totals.dropped[why] = self.totals.dropped.get(why, 0) + num_tokens


def _mean(before: float, new: float) -> float:
    return new if not before else (1 - SMOOTH) * before + SMOOTH * new
