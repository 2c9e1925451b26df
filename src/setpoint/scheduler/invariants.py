"""Checks the invariants that hold between two steps, and reports each violation as a sentence.
Tests check them at every step, a server when it is idle or strict."""

from __future__ import annotations

from collections import Counter

from setpoint.core.pool import PoolStats
from setpoint.scheduler.sequence import Sequence, Status
from setpoint.scheduler.state import State


def violations(state: State) -> list[str]:
    """Every violated invariant of the scheduler's state and of its cache; O(tree + pages)."""
    found = list(state.cache.check())
    living = [*state.running.values(), *state.draining.values()]
    num_private = sum(state.holdings.private_pages(seq) for seq in living)
    held = (num_private + state.transfers.num_held_pages) * state.cache.page_size
    pool = state.cache.pool_stats()
    if held != pool.held:
        found.append(
            f"sequences and transfers hold {held} private tokens, but the pool counts {pool.held}"
        )
    found += leaks(pool, idle=state.is_settled)
    slots = Counter(state.slots) + Counter(seq.slot for seq in living)
    if sorted(slots) != list(range(state.config.num_slots)) or max(slots.values()) > 1:
        found.append(f"slots are not each owned once: {dict(slots)}")
    found += _misplaced(state)
    inflight = Counter(seq.seq_id for step in state.inflight for seq in step.seqs)
    for seq in living:
        if inflight[seq.seq_id] != seq.inflight_steps:
            found.append(
                f"sequence {seq.seq_id} counts {seq.inflight_steps} steps in flight, but"
                f" {inflight[seq.seq_id]} contain it"
            )
        covered = state.holdings.num_covered(seq)
        if seq.num_scheduled > covered:
            found.append(
                f"sequence {seq.seq_id} has {seq.num_scheduled} tokens planned on pages for"
                f" {covered}"
            )
        if not state.holdings.reaches_its_windows(seq):
            found.append(f"sequence {seq.seq_id} lacks pages that its windows reach back to")
    found += [
        f"sequence {seq.seq_id} counts {seq.num_scheduled} tokens planned, knows {seq.num_known}"
        f" and may get {seq.inflight_samples}"
        for seq in state.running.values()
        if seq.prefilled and seq.max_new_tokens and seq.num_scheduled != _num_planned(seq)
    ]
    found += [
        f"sequence {seq.seq_id} drains without a step in flight"
        for seq in state.draining.values()
        if not seq.inflight_steps
    ]
    found += [
        f"waiting sequence {seq.seq_id} holds memory"
        for seq in (*state.preparing, *state.queue, *state.handing.values())
        if seq.handle is not None or len(seq.pages)
    ]
    places = [seq.place for seq in state.queue]
    if places != sorted(places):
        found.append(f"the queue is not in the order of arrival: {places}")
    if sum(seq.num_known for seq in state.queue) != state.queue.num_tokens:
        found.append("the queue's token count is wrong")
    return found


def _misplaced(state: State) -> list[str]:
    """Sequences whose status is not that of the set they are in."""
    living = [*state.running.values(), *state.handing.values(), *state.draining.values()]
    found: list[str] = []
    for name, seqs, status in (
        ("preparing", list(state.preparing), Status.PREPARING),
        ("queue", list(state.queue), Status.WAITING),
        ("running", list(state.running.values()), Status.RUNNING),
        ("handing", list(state.handing.values()), Status.HANDING),
        ("draining", list(state.draining.values()), Status.FINISHED),
    ):
        found += [
            f"sequence {seq.seq_id} in {name} has status {seq.status.value}"
            for seq in seqs
            if seq.status is not status
        ]
    found += [
        f"sequence {seq.seq_id} in {seq.status.value} has the needs {sorted(seq.needs)}"
        for seq in (*state.preparing, *state.queue, *living)
        if (seq.status is Status.PREPARING) is not bool(seq.needs)
    ]
    return found


def _num_planned(seq: Sequence) -> int:
    """The ``num_scheduled`` that a sequence past its prompt must have: all tokens except the last
    one have KV, computed or planned."""
    return seq.num_known + seq.inflight_samples - 1


def leaks(pool: PoolStats, *, idle: bool) -> list[str]:
    """Every violation of the pool's accounting: free + evictable + locked + held = total, no count
    is negative, and an idle engine holds nothing. O(1)."""
    found = []
    if min(pool.free, pool.evictable, pool.locked, pool.held) < 0:
        found.append(f"a negative count in {pool}")
    if pool.free + pool.evictable + pool.locked + pool.held != pool.total:
        found.append(f"the pool does not add up: {pool}")
    if idle and (pool.locked or pool.held):
        found.append(f"an idle engine has {pool.locked} locked and {pool.held} held tokens")
    return found
