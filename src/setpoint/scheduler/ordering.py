"""The order in which waiting sequences are considered: builds the policy's view, and falls back to
the order of arrival where the policy cannot work."""

from __future__ import annotations

from collections import Counter

from setpoint.core.records import Fallback, Observer
from setpoint.core.settings import Settings
from setpoint.scheduler.policy import POLICIES, Candidate, Policy, QueueView, fcfs
from setpoint.scheduler.sequence import Sequence
from setpoint.scheduler.state import State

TOUCH_INTERVAL = 32
"""Number of passes between two refreshes of the recency of waiting prompts' prefixes, under
policies that do not match them (docs/sglang/scheduling.md#queue-orders)."""
TOUCH_REQUESTS = 128


class WaitingOrder:
    """Counts the passes, and remembers which policies had to fall back."""

    def __init__(self, state: State, observer: Observer) -> None:
        self._state = state
        self._observer = observer
        self._fell_back: set[str] = set()
        self._num_passes = 0

    def take(self, settings: Settings) -> list[Sequence]:
        """Every waiting sequence, in the order in which to admit them."""
        state, policy = self._state, POLICIES[settings.policy]
        self._num_passes += 1
        config = state.config
        crowded = policy.queue_limit is not None and len(state.queue) > policy.queue_limit
        matches = policy.reads_cache and state.cache.enabled and not crowded
        if not matches:
            self._touch()
        if policy.reads_cache and not matches and settings.policy not in self._fell_back:
            self._fell_back.add(settings.policy)
            why = (
                f"{len(state.queue)} requests wait, more than {policy.queue_limit}"
                if crowded
                else "there is no prefix cache"
            )
            self._observer.on(Fallback(f"{settings.policy} acts as fcfs", why))
        if policy.reads_cache != matches or (policy.order is fcfs and settings.priority is None):
            return list(state.queue)
        view = QueueView(
            [self._candidate(seq, policy) for seq in state.queue],
            in_batch_check=config.in_batch_check,
            in_batch_deprioritize=config.in_batch_deprioritize,
            num_processed=state.num_processed,
            running_keys=Counter(
                key for seq in state.running.values() if (key := seq.request.options.routing_key)
            ),
            seed=(config.seed, self._num_passes),
        )
        return [state.queue[seq_id] for seq_id in policy.order(view)]

    def _candidate(self, seq: Sequence, policy: Policy) -> Candidate:
        request, cache = seq.request, self._state.cache
        if not policy.reads_cache:
            return Candidate(
                seq.seq_id,
                urgency=seq.urgency,
                max_new_tokens=seq.max_new_tokens,
                routing_key=request.options.routing_key,
            )
        ids = seq.known_ids()
        path: tuple[int, ...] = ()
        if policy.reads_paths:
            num_matched, path = cache.trace(ids, request.options.namespace)
        else:
            num_matched = cache.peek(ids, request.options.namespace)
        return Candidate(
            seq.seq_id, ids, request.options.namespace, num_matched, path, arrived_at=seq.arrived_at
        )

    def _touch(self) -> None:
        """Refresh the recency of the waiting sequences' prefixes, so that they are evicted last.
        The head of the queue is refreshed last, because it is needed first."""
        state = self._state
        if state.cache.enabled and self._num_passes % TOUCH_INTERVAL == 0:
            for seq in reversed(list(state.queue)[:TOUCH_REQUESTS]):
                state.cache.touch(seq.known_ids(), seq.request.options.namespace)
