"""Random traces through the real scheduler and loop: whatever arrives, every request ends, with the
right tokens, and nothing leaks.

The scripted executor answers from its page store, so a wrong page anywhere gives wrong tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from setpoint.core.errors import RequestError
from setpoint.core.pagerows import PageRow, WindowColumns
from setpoint.core.records import (
    PreparationStarted,
    RequestAdmitted,
    RequestClipped,
    RequestDone,
    SettingsChanged,
)
from setpoint.core.request import Ids, LogprobOptions, Request
from setpoint.core.settings import CadenceSettings, DelaySettings, PrioritySettings
from setpoint.scheduler.policy import POLICIES
from setpoint_testing.harness import VOCAB, Harness, ids_of
from setpoint_testing.preparers import ScriptedPreparer
from setpoint_testing.scripted import hashed_token, reference

NEXT = hashed_token(VOCAB)
EOS = frozenset({0, 1, 2, 3})
TOKENS_PER_ROW = pytest.mark.parametrize("most", [1, 4])
EVICTION = {
    "lru": {},
    "lfu": {},
    "slru": {"protected_threshold": 1},
    "priority": {},
    "tlru": {"threshold": 20, "next_prompt_estimate": 5},
}


ROWS = (
    PageRow(1, (WindowColumns(5, 1, 2),), read_step=1),
    PageRow(1, (WindowColumns(9, 1, 4),), read_step=4),
    PageRow(0, (WindowColumns(7, 0, 1),), read_step=1),
)
"""The page rows of models with windows."""


def random_harness(rng: random.Random, most: int, row: PageRow | None = None) -> Harness:
    """``most``: tokens that a decode row may bring; it brings any number from none on."""
    how_many = random.Random(rng.random())
    preparer = ScriptedPreparer(make_grammar, needs=is_constrained, hold=True)
    page_size = rng.choice([1, 2, 4, 16])
    num_pages = rng.choice([12, 20, 40]) * max(1, 8 // page_size)
    if row is not None:
        num_pages = max(num_pages, 3 * 16 // page_size) * row.width
    depth = rng.choice([0, 1, 2])
    eviction = rng.choice(list(EVICTION))
    return Harness(
        num_pages=num_pages,
        page_size=page_size,
        row=row,
        cache_enabled=rng.random() < 0.8,
        eviction_policy=eviction,
        eviction_parameters=EVICTION[eviction],
        depth=depth,
        replan_inflight=depth < 2 or rng.random() < 0.5,
        eos_token_ids=EOS,
        waiting_timeout_s=rng.choice([*[None] * 5, 0.1]),
        running_timeout_s=rng.choice([*[None] * 5, 0.1]),
        in_batch_check=4,
        in_batch_deprioritize=4,
        test_retract_interval=rng.choice([0, 0, 1, 3, 7]),
        preparer=preparer,
        max_tokens_per_row=most,
        num_tokens=lambda n: how_many.randint(0, n) if most > 1 else n,
        seed=rng.randrange(100),
        **random_settings(rng, page_size, rng.choice([1, 2, 5, 16])),
    )


def random_settings(rng: random.Random, page_size: int, most_running: int) -> dict[str, Any]:
    """Fields of Settings."""
    return {
        "max_running_requests": most_running,
        "chunked_prefill_size": rng.choice([None, page_size, 2 * page_size, 32]),
        "max_prefill_tokens": rng.choice([page_size, 64, 16384]),
        "prefill_max_requests": rng.choice([None, None, 1, 3]),
        "mixed_chunk": rng.random() < 0.4,
        "stream_interval": rng.choice([1, 1, 3]),
        "conservativeness": rng.choice([1.0, 1.0, 0.05]),
        **random_queue_rules(rng),
    }


def random_queue_rules(rng: random.Random) -> dict[str, Any]:
    """Any policy, priorities where they are allowed, and all that holds prefill back or ends a
    request early."""
    policy = rng.choice([*POLICIES, "fcfs", "fcfs", "lof"])
    priority = PrioritySettings(
        default=rng.choice([None, 0, 5]),
        low_first=rng.random() < 0.5,
        preempt=rng.random() < 0.9,
        threshold=rng.choice([0, 0, 3, 10]),
        retract_first=rng.random() < 0.5,
    )
    return {
        "policy": policy,
        "priority": priority if policy in ("fcfs", "lof") and rng.random() < 0.9 else None,
        "refuse_priority": rng.random() < 0.1,
        "max_queued_requests": rng.choice([*[None] * 5, 3]),
        "cadence": CadenceSettings(
            prefill_decode_interval=rng.choice([0, 0, 1, 4]),
            min_decoding=rng.choice([0, 2]),
            decode_after_piece=rng.choice([0, 1]),
            continuous_decode_steps=rng.choice([1, 1, 3]),
        ),
        "delay": DelaySettings(
            enabled=rng.random() < 0.3,
            low_usage=rng.choice([None, 0.3]),
            queue_ratio=rng.choice([None, 0.5]),
            min_free_slots=rng.choice([None, None, 2]),
            max_passes=rng.choice([1, 5, 30]),
            max_delay_s=rng.choice([0.01, 5.0]),
        ),
    }


class AllTokens:
    """A grammar that allows everything, and is told exactly what the client gets."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.accepted: list[int] = []

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def fill_mask(self, words: Ids) -> None:
        allowed = np.zeros(len(words) * 32, np.uint8)
        allowed[:VOCAB] = 1
        words[:] = np.packbits(allowed, bitorder="little").view(np.int32)

    @property
    def terminated(self) -> bool:
        return False


def is_constrained(request: Request) -> bool:
    return request.seed % 5 == 0


def make_grammar(request: Request) -> AllTokens:
    if request.seed % 25 == 20:
        raise RequestError("its grammar is wrong")
    return AllTokens(request)


def let_go(harness: Harness, rng: random.Random) -> None:
    """Some of those that wait for their grammar have it."""
    for seq_id in list(harness.preparer.open):
        if rng.random() < 0.5:
            harness.preparer.finish(seq_id)
    harness.turn()


def finish_all(harness: Harness, rng: random.Random) -> None:
    while harness.scheduler.state.preparing:
        let_go(harness, rng)
    harness.drain()


def check_records(harness: Harness) -> None:
    """The life of every request is told exactly once, agrees with what its client heard, and its
    times are in order."""
    records = harness.recorder
    lives = {done.rid: done for done in records.of(RequestDone)}
    assert len(lives) == len(records.of(RequestDone)) == len(harness.outcomes)
    admissions = Counter(admitted.rid for admitted in records.of(RequestAdmitted))
    for rid, outcome in harness.outcomes.items():
        life = lives[rid]
        if outcome.finish is not None:
            assert life.finish == outcome.finish
            assert life.num_outputs == len(outcome.ids)
            assert life.num_retractions == outcome.num_retractions
        assert admissions[rid] in (life.num_retractions, life.num_retractions + 1)
        assert (life.admitted_at is None) == (admissions[rid] == 0)
        assert (life.first_token_at is None) == (life.num_outputs == 0)
        times = [life.accepted_at, life.admitted_at, life.first_token_at, life.ended_at]
        known = [time for time in times if time is not None]
        assert known == sorted(known), (rid, times)
    assert admissions.total() == sum(step.num_new_seqs for step in records.steps)
    sent_back = sum(record.num_seqs for record in records.retractions)
    sent_back += sum(len(record.preempted) for record in records.preemptions)
    assert sent_back == sum(life.num_retractions for life in lives.values())


def change_settings(harness: Harness, rng: random.Random) -> None:
    most_running = rng.randint(1, harness.config.num_slots)
    settings = random_settings(rng, harness.cache.page_size, most_running)
    most, chunk = harness.settings.chunked_prefill_size, settings["chunked_prefill_size"]
    if most is not None and (chunk is None or chunk > most):
        settings["chunked_prefill_size"] = most
    harness.change(**settings)


def check_outcomes(
    harness: Harness, expected: dict[str, list[int]], ended: set[str], seed: int
) -> None:
    """``ended``: those that were stopped or aborted."""
    for rid, outcome in harness.outcomes.items():
        assert outcome.logprob_ids == outcome.ids, (seed, rid)
        if rid in ended:
            assert outcome.ids == expected[rid][: len(outcome.ids)], (seed, rid)
            continue
        assert outcome.finish is not None, (seed, rid, "never ended")
        if outcome.finish.type == "abort":
            # 400: its prompt leaves no room for output. 503: the queue was full, its time was up,
            # or priorities are off.
            assert outcome.finish.status_code in (400, 503), (seed, rid, outcome.finish)
            assert outcome.ids == expected[rid][: len(outcome.ids)], (seed, rid)
            continue
        clipped = any(clip.rid == rid for clip in harness.recorder.of(RequestClipped))
        want = expected[rid][: len(outcome.ids)] if clipped else expected[rid]
        assert outcome.ids == want, (seed, rid)


def run_trace(
    seed: int, most: int, row: PageRow | None = None, *, changes: float = 0.0
) -> tuple[Harness, int]:
    """``changes``: how often the settings are others before a request."""
    rng = random.Random(seed)
    harness = random_harness(rng, most, row)
    limit = harness.config.max_req_input_len
    prefixes = [
        [rng.randrange(VOCAB) for _ in range(rng.randrange(1, max(2, min(limit // 2, 60))))]
        for _ in range(3)
    ]
    expected: dict[str, list[int]] = {}
    ended: set[str] = set()
    for number in range(rng.randrange(5, 25)):
        rid = f"r{number:02}"
        prompt = (rng.choice(prefixes) if rng.random() < 0.6 else []) + [
            rng.randrange(3) for _ in range(rng.randrange(1, 20))
        ]
        prompt = prompt[: limit - 1]
        ignore_eos = rng.random() < 0.3
        max_new = rng.choice([0, 1, 5, 30, 90])
        full = reference(ids_of(prompt), max_new, NEXT, frozenset() if ignore_eos else EOS)
        prior = full[: rng.randrange(len(full))] if full and rng.random() < 0.2 else []
        prior = prior[: max(0, limit - 1 - len(prompt))]
        harness.submit(
            rid,
            prompt,
            prior=prior,
            max_new_tokens=max_new,
            ignore_eos=ignore_eos,
            stream=rng.random() < 0.7,
            namespace=rng.choice(["", "a"]),
            priority=rng.choice([None, 0, 1, 5, 20]),
            routing_key=rng.choice(["", "k", "l"]),
            logprobs=LogprobOptions(),
        )
        expected[rid] = full[len(prior) :]
        if rng.random() < changes:
            change_settings(harness, rng)
        harness.turn(rng.choice([0, 0, 1, 5, 20]))
        let_go(harness, rng)
        if rng.random() < 0.15:
            victim = rng.choice(list(expected))
            ended.add(victim)
            harness.stop(victim) if rng.random() < 0.5 else harness.abort(victim)
    finish_all(harness, rng)
    check_outcomes(harness, expected, ended, seed)
    check_records(harness)
    assert harness.cache.locked_tokens == 0
    assert harness.cache.pool_stats().held == 0
    return harness, len(expected)


@TOKENS_PER_ROW
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.full) for block in (1, 2, 3))]
)
def test_random_traces_end_with_the_right_tokens(block: int, most: int) -> None:
    requests = retractions = hits = steps = preemptions = dropped = prepared = 0
    policies, brought = set(), set()
    for seed in range(block * 50, block * 50 + 50):
        harness, count = run_trace(seed, most)
        requests += count
        retractions += len(harness.recorder.retractions)
        hits += sum(outcome.num_cached > 0 for outcome in harness.outcomes.values())
        steps += len(harness.plans)
        preemptions += len(harness.recorder.preemptions)
        dropped += sum(
            done.finish.status_code == 503 and done.accepted_at is not None
            for done in harness.recorder.of(RequestDone)
        )
        prepared += len(harness.recorder.of(PreparationStarted))
        policies.add(harness.scheduler.state.settings.policy)
        brought |= {
            step.num_sampled for step in harness.recorder.steps if step.num_decode_rows == 1
        }
    # The traces must exercise what they claim to.
    assert requests > 300
    assert retractions > 20
    assert hits > 50
    assert steps > 2000
    assert preemptions > 1
    assert dropped > 5
    assert prepared > 50
    assert len(policies) > 5
    assert brought >= set(range(most + 1) if most > 1 else [1])


@pytest.mark.cases(1)
@pytest.mark.parametrize("row", ROWS)
def test_random_traces_of_models_with_windows(row: PageRow) -> None:
    """What a row of the scripted executor reads behind its window is compared token by token."""
    hits = retractions = given_back = 0
    for seed in range(12):
        harness, _ = run_trace(seed, 1 + seed % 4, row)
        hits += sum(outcome.num_cached > 0 for outcome in harness.outcomes.values())
        retractions += len(harness.recorder.retractions)
        given_back += sum((plan.pages.pages == 0).any() for plan in harness.plans)
    assert hits > 15
    assert retractions > 5
    assert given_back > 2


@pytest.mark.cases(1)
@TOKENS_PER_ROW
@pytest.mark.parametrize("count", [20, pytest.param(50, marks=pytest.mark.full)])
def test_settings_may_change_at_any_turn(most: int, count: int) -> None:
    """Fewer may run than do, chunks shrink in mid-prompt, priorities begin to matter: what was
    admitted ends, and with the right tokens."""
    changes = crowded = preemptions = 0
    for seed in range(count):
        row = (None, None, *ROWS)[seed % 5]
        harness, _ = run_trace(20_000 + seed, most, row, changes=0.5)
        changed = harness.recorder.of(SettingsChanged)
        changes += len(changed)
        least = min((each.settings.max_running_requests for each in changed), default=99)
        crowded += any(step.num_running > least for step in harness.recorder.steps)
        preemptions += len(harness.recorder.preemptions)
    assert changes > 4 * count
    assert crowded > count // 10
    assert preemptions > 0


@TOKENS_PER_ROW
@pytest.mark.full
@pytest.mark.timeout(1800)
def test_many_random_traces(most: int) -> None:
    for seed in range(1_000, 1_600):
        run_trace(seed, most)
        run_trace(seed, most, ROWS[seed % len(ROWS)])
        run_trace(20_000 + seed, most, (None, None, *ROWS)[seed % 5], changes=0.5)
