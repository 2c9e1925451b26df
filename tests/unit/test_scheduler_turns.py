"""Who gets a turn, and for how long: decode between prefills, admissions that wait for company, time limits, policies in the loop."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from setpoint.core.stats import Refusal
from setpoint.scheduler.cadence import Cadence
from setpoint.scheduler.config import CadenceConfig, DelayConfig, PriorityConfig, RatioConfig
from setpoint.scheduler.delay import AdmissionDelay, DelayView
from setpoint.testing.harness import VOCAB, Harness
from setpoint.testing.scripted import hashed_token, reference

DEPTHS = pytest.mark.parametrize(("depth", "replan"), [(0, True), (1, True), (2, True), (2, False)])
WAITED = "Request waiting timeout reached."
RAN = "Request running timeout reached."


def prompt(length: int, first: int = 10) -> list[int]:
    return [first, *((first * 7 + index) % VOCAB for index in range(length - 1))]


def expected(length: int, first: int, num_new: int) -> list[int]:
    return reference(np.array(prompt(length, first), np.int32), num_new, hashed_token(VOCAB))


def kinds(harness: Harness) -> str:
    """P for every prefill step, D for every decode step, M for both in one."""
    letters = {(True, False): "P", (False, True): "D", (True, True): "M"}
    return "".join(letters[stats.num_prefill_rows > 0, stats.num_decode_rows > 0] for stats in harness.recorder.steps)


# ---------------------------------------------------------------------- cadence


@pytest.mark.parametrize(
    ("cadence", "steps"),
    [
        (CadenceConfig(), "PDPPPPDD"),
        (CadenceConfig(prefill_decode_interval=2), "PDDPDDPDDP"),
        (CadenceConfig(prefill_decode_interval=2, min_decoding=2), "PDPPPDDP"),
        (CadenceConfig(continuous_decode_steps=3), "PDDDPPPPDDD"),
        (CadenceConfig(prefill_decode_interval=1, continuous_decode_steps=3), "PDPDPDPDPDDD"),
    ],
)
def test_decode_steps_between_prefills(cadence: CadenceConfig, steps: str) -> None:
    harness = Harness(num_pages=200, chunked_prefill_size=8, cadence=cadence)
    harness.submit("a", prompt(4, 10), max_new_tokens=40)
    harness.turn(2)
    harness.submit("b", prompt(20, 20), max_new_tokens=40)  # three chunks; the last has room for one more
    harness.submit("c", prompt(9, 30), max_new_tokens=40)
    harness.turn(len(steps) - 2)
    assert kinds(harness).startswith(steps)
    harness.drain()
    assert harness.outcomes["b"].ids == expected(20, 20, 40)


def test_who_waits_for_a_decode_turn_is_counted() -> None:
    harness = Harness(cadence=CadenceConfig(prefill_decode_interval=3))
    harness.submit("a", prompt(4, 10), max_new_tokens=20)
    harness.turn()
    harness.submit("b", prompt(4, 20))
    harness.submit("c", prompt(4, 30))
    harness.turn()
    assert harness.recorder.steps[-1].refusals == {Refusal.DECODE_TURN: 1, Refusal.BLOCKED: 1}
    harness.drain()


def test_prefill_never_waits_for_nobody() -> None:
    cadence = Cadence(CadenceConfig(prefill_decode_interval=5))
    cadence.planned(prefill=True, num_decoding=1)
    assert cadence.decode_only(1)
    assert not cadence.decode_only(0)
    harness = Harness(num_pages=200, chunked_prefill_size=8, cadence=CadenceConfig(prefill_decode_interval=5))
    harness.submit("a", prompt(40), max_new_tokens=2)
    harness.turn(5)
    assert kinds(harness) == "PPPPP"


@DEPTHS
def test_tokens_do_not_depend_on_the_cadence(depth: int, replan: bool) -> None:
    harness = Harness(
        num_pages=44, chunked_prefill_size=8, depth=depth, replan_inflight=replan, ratio=RatioConfig(conservativeness=0.01),
        cadence=CadenceConfig(prefill_decode_interval=3, continuous_decode_steps=2),
    )  # fmt: skip
    for number in range(5):
        harness.submit(f"r{number}", prompt(6 + number, 10 + number), max_new_tokens=24)
        harness.turn(2)
    harness.drain()
    assert harness.recorder.retractions
    for number in range(5):
        assert harness.outcomes[f"r{number}"].ids == expected(6 + number, 10 + number, 24)


# ---------------------------------------------------------------------- delayed admission


def view(num_running: int = 4, num_free_slots: int = 1, num_queued: int = 1, usage: float = 0.5, now: float = 0.0) -> DelayView:
    return DelayView(num_running, num_free_slots, num_queued, usage, now)


def delay(largest: int, **config: Any) -> AdmissionDelay:
    rule = AdmissionDelay(DelayConfig(**config))
    rule.admitted(largest)
    return rule


@pytest.mark.parametrize(
    ("config", "look", "holds"),
    [
        ({}, view(), False),
        ({"enabled": True}, view(), True),
        ({"enabled": True}, view(num_running=0), False),
        ({"enabled": True}, view(num_free_slots=3), False),
        ({"enabled": True, "low_usage": 0.6}, view(), False),
        ({"enabled": True, "low_usage": 0.4}, view(), True),
        ({"enabled": True, "queue_ratio": 0.5}, view(num_free_slots=9), True),
        ({"enabled": True, "queue_ratio": 0.5}, view(num_free_slots=9, num_queued=2), False),
        ({"enabled": True, "queue_ratio": 0.5}, view(num_running=100, num_free_slots=9, num_queued=3), False),
        ({"enabled": True, "queue_ratio": 0.1}, view(num_free_slots=9), False),
        ({"queue_ratio": 0.5}, view(num_free_slots=9), False),
        ({"min_free_slots": 2}, view(), True),
        ({"min_free_slots": 2}, view(num_free_slots=2), False),
        ({"min_free_slots": 2}, view(num_running=0), False),
    ],
)
def test_when_admission_waits(config: dict[str, Any], look: DelayView, holds: bool) -> None:
    assert delay(3, **config).holds(look) is holds


def test_a_wait_ends_after_its_passes_and_its_time() -> None:
    rule = delay(3, enabled=True, max_passes=4)
    assert [rule.holds(view()) for _ in range(10)] == [True] * 4 + [False] + [True] * 4 + [False]
    rule = delay(3, enabled=True, max_delay_s=0.5)
    assert [rule.holds(view(now=now)) for now in (7.0, 7.4, 7.6, 7.7)] == [True, True, False, True]


def test_delayed_admissions_come_together_and_are_counted() -> None:
    def admitted(**rules: Any) -> list[int]:
        harness = Harness(num_pages=900, max_running_requests=8, delay=DelayConfig(**rules))
        for number in range(8):
            harness.submit(f"first{number}", prompt(4, 10 + number), max_new_tokens=4 + 2 * number)
        for number in range(8):
            harness.submit(f"next{number}", prompt(4, 40 + number), max_new_tokens=60)
        harness.drain()
        delayed = any(Refusal.DELAYED in stats.refusals for stats in harness.recorder.steps)
        assert delayed == bool(rules)
        return [stats.num_new_seqs for stats in harness.recorder.steps if stats.num_new_seqs]

    assert admitted()[:4] == [8, 1, 1, 1]
    assert admitted(min_free_slots=3)[:3] == [8, 3, 3]
    assert admitted(enabled=True, max_passes=6)[:2] == [8, 2]


# ---------------------------------------------------------------------- time limits


def finish_of(harness: Harness, rid: str) -> tuple[str, int | None, str | None]:
    finish = harness.outcomes[rid].finish
    assert finish is not None
    return finish.type, finish.status_code, finish.message


@DEPTHS
def test_a_request_waits_no_longer_than_allowed(depth: int, replan: bool) -> None:
    harness = Harness(max_running_requests=1, waiting_timeout_s=5.0, depth=depth, replan_inflight=replan)
    harness.submit("runs", prompt(4, 10), max_new_tokens=30)
    harness.submit("old", prompt(4, 20))
    harness.turn(3)
    harness.clock.advance(4.0)
    harness.submit("young", prompt(4, 30))
    harness.turn()
    assert harness.waiting() == ["old", "young"]
    harness.clock.advance(2.0)
    harness.turn()
    assert harness.waiting() == ["young"]
    assert finish_of(harness, "old") == ("abort", 503, WAITED)
    assert harness.recorder.dropped == [("old", WAITED)]
    harness.drain()
    assert harness.outcomes["runs"].ids == expected(4, 10, 30)
    assert harness.outcomes["young"].ids == expected(4, 30, 4)


@DEPTHS
def test_a_request_runs_no_longer_than_allowed(depth: int, replan: bool) -> None:
    harness = Harness(max_running_requests=2, running_timeout_s=5.0, depth=depth, replan_inflight=replan)
    harness.submit("a", prompt(4, 10), max_new_tokens=50)
    harness.turn(4)
    harness.clock.advance(3.0)
    harness.submit("b", prompt(4, 20), max_new_tokens=9)
    harness.turn(3)
    assert bool(harness.sequence("a").inflight_steps) == bool(depth), "it ends while a step of it is in flight"
    harness.clock.advance(3.0)
    harness.turn()
    assert finish_of(harness, "a") == ("abort", 503, RAN)
    harness.drain()
    assert harness.outcomes["a"].ids == expected(4, 10, 50)[: len(harness.outcomes["a"].ids)]
    assert harness.outcomes["b"].ids == expected(4, 20, 9)


def test_the_prompt_in_mid_prefill_can_run_out_of_time() -> None:
    harness = Harness(num_pages=100, chunked_prefill_size=8, running_timeout_s=5.0)
    harness.submit("long", prompt(60), max_new_tokens=2)
    harness.turn(2)
    harness.clock.advance(6.0)
    harness.submit("next", prompt(6, 20), max_new_tokens=2)
    harness.drain()
    assert finish_of(harness, "long") == ("abort", 503, RAN)
    assert harness.outcomes["next"].ids == expected(6, 20, 2)


def test_a_preempted_request_starts_to_wait_anew() -> None:
    harness = Harness(max_running_requests=1, waiting_timeout_s=5.0, priority=PriorityConfig(threshold=0))
    harness.submit("slow", prompt(4, 10), max_new_tokens=20, priority=0)
    harness.turn(3)
    harness.clock.advance(100.0)
    harness.submit("urgent", prompt(4, 20), max_new_tokens=20, priority=1)
    harness.turn(2)
    harness.clock.advance(4.0)
    harness.turn()
    assert harness.waiting() == ["slow"]
    harness.clock.advance(2.0)
    harness.turn()
    assert finish_of(harness, "slow") == ("abort", 503, WAITED)
    harness.drain()


# ---------------------------------------------------------------------- policies in the loop


def admissions(harness: Harness) -> list[str]:
    """rids in the order of their admission; the engine is drained."""
    harness.drain()
    rids = list(harness.outcomes)
    return [rids[admit.seq_id] for plan in harness.plans for admit in plan.admits]


def test_lof_in_the_loop() -> None:
    harness = Harness(max_running_requests=1, policy="lof")
    for number, limit in enumerate([3, 9, 6]):
        harness.submit(f"r{number}", prompt(4, 10 + number), max_new_tokens=limit)
    assert admissions(harness) == ["r1", "r2", "r0"]


def test_random_in_the_loop_is_repeatable() -> None:
    def run(seed: int) -> list[str]:
        harness = Harness(max_running_requests=1, policy="random", seed=seed, num_pages=200)
        for number in range(8):
            harness.submit(f"r{number}", prompt(4, 10 + number), max_new_tokens=2)
        return admissions(harness)

    assert run(1) == run(1) != run(2)


def test_routing_key_in_the_loop() -> None:
    harness = Harness(max_running_requests=3, policy="routing-key", num_pages=200)
    for rid, key, limit in (("a1", "a", 30), ("a2", "a", 30), ("b1", "b", 3), ("none", "", 3), ("b2", "b", 3), ("a3", "a", 3)):
        harness.submit(rid, prompt(4, 10 + len(harness.outcomes)), max_new_tokens=limit, routing_key=key)
    assert admissions(harness)[3:] == ["a3", "none", "b2"]


def test_dfs_weight_in_the_loop() -> None:
    harness = Harness(max_running_requests=1, policy="dfs-weight", num_pages=400)
    heavy, light = prompt(12, 20), prompt(12, 50)
    for number, cached in enumerate((heavy, light)):
        harness.submit(f"warm{number}", cached, max_new_tokens=1)
        harness.drain()
    harness.plans.clear()
    for rid, ids in (("cold", prompt(5, 80)), ("l1", [*light, 1]), ("h1", [*heavy, 1]), ("h2", [*heavy[:6], 2]), ("h3", [*heavy, 3])):
        harness.submit(rid, ids, max_new_tokens=1)
    # With h1 and h3 gone the subtrees weigh one each: the earlier request goes first.
    assert admissions(harness) == ["h1", "h3", "l1", "h2", "cold"]


def stream_of_short_ones(policy: str, turns: int) -> Harness:
    """One slot, one long prompt, and always two short ones that have just come."""
    harness = Harness(max_running_requests=1, policy=policy, num_pages=800, in_batch_check=-1)
    numbers = itertools.count()
    harness.submit("running", prompt(4, 3), max_new_tokens=3)
    harness.submit("long", prompt(150, 4), max_new_tokens=1)
    for _ in range(turns):
        while len(harness.waiting()) + len(harness.wire.inbox) < 3:
            number = next(numbers)
            harness.submit(f"short{number}", [5 + number % 80, number // 80, 1, 2, 3], max_new_tokens=1)
        harness.turn()
    return harness


def test_hrrn_serves_a_long_prompt_however_many_short_ones_come() -> None:
    assert stream_of_short_ones("hrrn", 400).outcomes["long"].finish is not None


def test_shortest_prefill_first_may_let_it_starve() -> None:
    assert stream_of_short_ones("shortest-prefill-first", 400).outcomes["long"].finish is None


def test_shortest_prefill_first_runs_short_prompts_beside_a_long_one() -> None:
    harness = Harness(num_pages=400, chunked_prefill_size=16, policy="shortest-prefill-first")
    harness.submit("long", prompt(60, 10), max_new_tokens=2)
    harness.turn()
    for rid, length in (("s1", 4), ("s2", 7), ("s3", 30)):
        harness.submit(rid, prompt(length, 10 + length), max_new_tokens=2)
    harness.turn()
    assert harness.rows() == [(0, 16, 5, False), (1, 0, 4, True), (2, 0, 7, True)]
    assert harness.sequence("long").prefilling
    harness.turn()
    assert harness.rows() == [(0, 21, 16, False)], "30 tokens would have to be cut, and one prompt at a time is in pieces"
    harness.drain()
    assert harness.outcomes["long"].ids == expected(60, 10, 2)
    assert harness.outcomes["s3"].ids == expected(30, 40, 2)


def test_shortest_prefill_first_leaves_the_long_one_a_page() -> None:
    harness = Harness(num_pages=400, chunked_prefill_size=16, max_running_requests=64, policy="shortest-prefill-first", in_batch_check=-1)
    harness.submit("long", prompt(60, 10), max_new_tokens=2)
    harness.turn()
    for number in range(30):
        harness.submit(f"s{number}", prompt(5, 20 + number), max_new_tokens=2)
    harness.turn()
    assert [row[2] for row in harness.rows()] == [1, 5, 5, 5]
    harness.drain()


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "hrrn"])
def test_without_a_prefix_cache_policies_that_read_it_are_fcfs(policy: str) -> None:
    harness = Harness(max_running_requests=1, policy=policy, cache_enabled=False)
    for number in range(4):
        harness.submit(f"r{number}", prompt(9 - number, 10 + number), max_new_tokens=2)
    assert admissions(harness) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("policy", ["lof", "random", "routing-key"])
def test_every_policy_but_those_that_match_keeps_waiting_prefixes_recent(policy: str) -> None:
    harness = Harness(num_pages=200, max_running_requests=1, policy=policy)
    for name, first in (("old", 50), ("new", 60)):
        harness.submit(name, [first] * 20, max_new_tokens=1)
        harness.drain()
    harness.submit("waits", [50] * 20 + [2], max_new_tokens=1)
    harness.submit("runs", [1] * 5, max_new_tokens=9)
    harness.scheduler._prefill._order._num_passes = 31
    harness.turn()
    pages = harness.cache.alloc(harness.cache.free_tokens + 1)  # evicts one leaf: the least recent
    assert pages is not None
    assert harness.cache.peek(np.full(20, 50, np.int32)) == 20
    harness.cache.free(pages)
