"""Admission rules, one scripted trace each (docs/sglang/scheduling.md#admission)."""

from __future__ import annotations

import pytest

from setpoint.core.plan import OWN_LENGTH
from setpoint.core.records import AdmissionRefusal
from setpoint.core.request import LogprobOptions
from setpoint.core.settings import PrioritySettings
from setpoint.scheduler.budget import PrefillBudget, fits_until_finish
from setpoint_testing.harness import VOCAB, Harness


def prompt(length: int, first: int = 10) -> list[int]:
    """Distinct requests share no prefix: the first token tells them apart."""
    return [first, *((first * 7 + index) % VOCAB for index in range(length - 1))]


def test_one_request_prefills_then_decodes_to_its_limit() -> None:
    harness = Harness()
    harness.submit("a", prompt(5), max_new_tokens=3)
    harness.drain()
    assert [harness.rows(index) for index in range(len(harness.plans))] == [
        [(0, 0, 5, True)],
        [(0, OWN_LENGTH, 1, 1)],
        [(0, OWN_LENGTH, 1, 1)],
    ]
    assert harness.outcomes["a"].finish is not None
    assert harness.outcomes["a"].finish.type == "length"
    assert harness.outcomes["a"].finish.length == 3


def test_prefill_has_priority_over_decode() -> None:
    harness = Harness()
    harness.submit("a", prompt(4, 10), max_new_tokens=9)
    harness.turn(2)
    harness.submit("b", prompt(4, 20), max_new_tokens=9)
    harness.turn()
    assert harness.rows() == [(1, 0, 4, True)]
    harness.turn()
    assert [row[0] for row in harness.rows()] == [0, 1]


def test_mixed_chunk_runs_decode_rows_beside_the_prompt() -> None:
    harness = Harness(mixed_chunk=True, chunked_prefill_size=8)
    harness.submit("a", prompt(4, 10), max_new_tokens=9)
    harness.turn(2)
    harness.submit("b", prompt(12, 20), max_new_tokens=9)
    harness.turn()
    assert harness.rows() == [
        (1, 0, 7, False),
        (0, OWN_LENGTH, 1, 1),
    ]  # the chunk is less the running batch
    harness.turn()
    assert harness.rows() == [(1, 7, 5, True), (0, OWN_LENGTH, 1, 1)]


def test_mixed_chunk_never_locks_prefill_out() -> None:
    harness = Harness(
        num_pages=200, mixed_chunk=True, chunked_prefill_size=4, max_running_requests=8
    )
    for number in range(7):
        harness.submit(f"a{number}", prompt(2, 10 + number), max_new_tokens=20)
    while len(harness.running()) < 7:
        harness.turn()
    harness.submit("late", prompt(3, 60), max_new_tokens=2)
    harness.turn(4)
    assert harness.sequence("late").prefilled


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_samples() -> None:
    harness = Harness(page_size=4, num_pages=16, chunked_prefill_size=8)
    harness.submit("a", prompt(19), max_new_tokens=2)
    harness.drain()
    assert [harness.rows(index)[0][1:] for index in range(4)] == [
        (0, 8, False),
        (8, 8, False),
        (16, 3, True),
        (OWN_LENGTH, 1, 1),
    ]


def test_at_most_one_sequence_is_in_mid_prefill() -> None:
    harness = Harness(num_pages=128, chunked_prefill_size=8)
    harness.submit("a", prompt(20, 10))
    harness.submit("b", prompt(20, 20))
    harness.turn()
    assert harness.running() == ["a"]
    harness.turn(2)
    assert harness.rows() == [
        (0, 16, 4, True),
        (1, 0, 4, False),
    ]  # what is left of the chunk goes to the next


def test_chunk_budget_counts_whole_pages() -> None:
    harness = Harness(page_size=4, num_pages=32, chunked_prefill_size=8)
    harness.submit("a", prompt(5, 10))
    harness.submit("b", prompt(3, 20))
    harness.turn()
    assert harness.running() == ["a"]  # 5 tokens fill 8


def test_max_prefill_tokens_limits_a_batch_but_not_its_first_request() -> None:
    harness = Harness(num_pages=128, max_prefill_tokens=10)
    harness.submit("a", prompt(15, 10))
    harness.submit("b", prompt(3, 20))
    harness.turn()
    assert harness.running() == ["a"]
    assert harness.recorder.steps[-1].refusals == {AdmissionRefusal.TOKEN_BUDGET: 1}


def test_with_chunks_max_prefill_tokens_never_keeps_a_long_prompt_out() -> None:
    """Ten pairs of a short and a long prompt: what the short one leaves of a chunk goes to the long
    one."""
    harness = Harness(
        num_pages=800, max_running_requests=20, chunked_prefill_size=8, max_prefill_tokens=16
    )
    for number in range(10):
        harness.submit(f"short{number}", prompt(1, 10 + number), max_new_tokens=1)
        harness.submit(f"long{number}", prompt(16, 40 + number), max_new_tokens=1)
    harness.drain()
    assert sum(stats.num_prefill_rows > 0 for stats in harness.recorder.steps) == 22


def test_max_prefill_tokens_below_the_chunk_ends_a_batch_that_has_spent_it() -> None:
    harness = Harness(num_pages=128, chunked_prefill_size=16, max_prefill_tokens=4)
    for number, length in enumerate((3, 9, 2)):
        harness.submit(f"r{number}", prompt(length, 10 + 10 * number))
    harness.turn()
    assert [row[2] for row in harness.rows()] == [3, 9]
    assert harness.recorder.steps[-1].refusals == {AdmissionRefusal.TOKEN_BUDGET: 1}


def test_prefill_max_requests() -> None:
    harness = Harness(num_pages=128, prefill_max_requests=2)
    for number in range(5):
        harness.submit(f"r{number}", prompt(3, 10 + number))
    harness.turn()
    assert harness.running() == ["r0", "r1"]
    assert harness.recorder.steps[-1].refusals == {
        AdmissionRefusal.PREFILL_LIMIT: 1,
        AdmissionRefusal.BLOCKED: 2,
    }


def test_max_running_requests_gives_no_slot_until_one_ends() -> None:
    harness = Harness(max_running_requests=2)
    for number in range(3):
        harness.submit(f"r{number}", prompt(3, 10 + number), max_new_tokens=2 + number)
    harness.turn()
    assert harness.running() == ["r0", "r1"]
    assert harness.recorder.steps[-1].refusals == {AdmissionRefusal.NO_SLOT: 1}
    harness.turn()
    assert harness.recorder.steps[-1].refusals == {
        AdmissionRefusal.NO_SLOT: 1
    }  # the reason is kept while the batch is full
    harness.turn()
    assert harness.running() == ["r1", "r2"]


@pytest.mark.parametrize("way", ["abort", "stop", "time limit", "dropped for a more urgent one"])
def test_the_queue_moves_on_when_the_request_that_did_not_fit_leaves_it(way: str) -> None:
    """Nobody is looked at while the first does not fit; with it gone the next one is."""
    replaced = way.startswith("dropped")
    harness = Harness(
        num_pages=100,
        waiting_timeout_s=5.0 if way == "time limit" else None,
        max_queued_requests=1 if replaced else None,
        priority=PrioritySettings(preempt=False) if replaced else None,
    )
    harness.submit("runs", prompt(10, 10), max_new_tokens=60, ignore_eos=True)
    harness.turn()
    harness.submit("big", prompt(50, 20), max_new_tokens=2, priority=1 if replaced else None)
    harness.turn(2)
    assert harness.recorder.steps[-1].refusals == {AdmissionRefusal.NO_MEMORY: 1}
    match way:
        case "abort":
            harness.abort("big")
        case "stop":
            harness.stop("big")
        case "time limit":
            harness.clock.advance(6.0)
    harness.submit("small", prompt(3, 30), max_new_tokens=2, priority=2 if replaced else None)
    harness.turn(1)
    assert harness.running() == ["runs", "small"]
    harness.drain()


def test_a_candidate_is_charged_its_full_output_and_running_ones_a_share() -> None:
    # 100 tokens. a: 10 + 40 outputs; running, its reserve is 39 * 0.7 * 0.5 = 13.65.
    harness = Harness(num_pages=100, conservativeness=0.5)
    harness.submit("a", prompt(10, 10), max_new_tokens=40)
    harness.turn()
    harness.submit("b", prompt(10, 20), max_new_tokens=66)  # 10 + 66 + 1 >= 90 - 13.65
    harness.turn()
    assert harness.waiting() == ["b"]
    assert harness.recorder.steps[-1].refusals == {AdmissionRefusal.NO_MEMORY: 1}
    harness.submit("c", prompt(10, 30), max_new_tokens=2)
    harness.turn()
    assert harness.waiting() == ["b", "c"], "no skipping ahead"
    assert harness.recorder.steps[-1].refusals == {
        AdmissionRefusal.NO_MEMORY: 1,
        AdmissionRefusal.BLOCKED: 1,
    }


def test_ignore_eos_requests_are_reserved_in_full() -> None:
    def waiting(ignore_eos: bool) -> list[str]:
        harness = Harness(num_pages=100)
        harness.submit("a", prompt(10, 10), max_new_tokens=60, ignore_eos=ignore_eos)
        harness.turn()
        harness.submit(
            "b", prompt(10, 20), max_new_tokens=25
        )  # 36 < 90 - 59 * 0.7 = 48.7, but not < 90 - 59 = 31
        harness.turn()
        return harness.waiting()

    assert waiting(False) == []
    assert waiting(True) == ["b"]


def test_outputs_are_clipped_in_the_estimate() -> None:
    harness = Harness(num_pages=100, clip_max_new_tokens=5)
    harness.submit("a", prompt(10, 10), max_new_tokens=80)
    harness.submit("b", prompt(10, 20), max_new_tokens=80)
    harness.turn()
    assert harness.running() == ["a", "b"]


def test_requests_that_arrive_together_share_a_prefix_in_the_same_step() -> None:
    harness = Harness(num_pages=400, max_running_requests=64)
    system = prompt(50, 5)
    for number in range(64):
        harness.submit(f"r{number}", [*system, 90 - number], max_new_tokens=2)
    harness.turn()
    assert sum(count for _, _, count, _ in harness.rows()) == 51 + 63
    assert harness.recorder.steps[-1].num_cached_tokens == 63 * 50
    harness.drain()


def test_the_last_prompt_token_is_always_computed() -> None:
    harness = Harness()
    harness.submit("a", prompt(8), max_new_tokens=1)
    harness.drain()
    harness.submit("b", prompt(8), max_new_tokens=1)
    harness.drain()
    assert harness.outcomes["b"].num_cached == 7
    assert harness.outcomes["b"].ids == harness.outcomes["a"].ids


def test_prompt_logprobs_keep_their_positions_out_of_the_prefix_match() -> None:
    harness = Harness()
    harness.submit("a", prompt(8), max_new_tokens=1)
    harness.drain()
    harness.submit("b", prompt(8), max_new_tokens=1, logprobs=LogprobOptions(3))
    harness.drain()
    assert harness.outcomes["b"].num_cached == 3
    assert (
        harness.plans[-1].admits[0].logprob_start == 4
    )  # position 3 has no logprob of its own: its predecessor is not computed


def test_namespaces_share_nothing() -> None:
    harness = Harness()
    harness.submit("a", prompt(8), max_new_tokens=1)
    harness.drain()
    harness.submit("b", prompt(8), max_new_tokens=1, namespace="tenant")
    harness.drain()
    assert harness.outcomes["b"].num_cached == 0


def test_without_radix_cache_nothing_is_matched_and_all_is_freed() -> None:
    harness = Harness(cache_enabled=False, policy="lpm")
    for rid in ("a", "b"):
        harness.submit(rid, prompt(8), max_new_tokens=1)
        harness.drain()
    assert harness.outcomes["b"].num_cached == 0
    assert harness.cache.free_tokens == harness.cache.total_tokens


def test_budget_lets_the_chunk_in_progress_pass_the_memory_reserve() -> None:
    budget = PrefillBudget(
        costs=Harness(page_size=4).scheduler.state.costs,
        clip_max_new_tokens=4096,
        input_left=100,
        chunk_left=16,
        requests_left=None,
        reserved=1000.0,
    )
    assert budget.exhausted(available=40) is AdmissionRefusal.NO_MEMORY
    assert budget.chunk(extend=50, available=40) == 16
    assert budget.chunk(extend=50, available=7) == 4
    assert budget.chunk(extend=3, available=7) == 3


@pytest.mark.parametrize(
    ("requests", "available", "fits"),
    [
        ([(10, 5)], 12, True),  # 10 more tokens leave 2 > 1
        ([(10, 5)], 11, False),
        ([(2, 30), (20, 5)], 10, True),  # the first ends after 2 steps and gives back 30
        ([(2, 3), (20, 5)], 10, False),
    ],
)
def test_ignore_eos_admission_follows_the_known_ends(
    requests: list[tuple[int, int]], available: int, fits: bool
) -> None:
    assert fits_until_finish(requests, available) is fits


def test_ignore_eos_without_cache_waits_until_the_ends_fit() -> None:
    harness = Harness(num_pages=60, cache_enabled=False)
    harness.submit("a", prompt(10, 10), max_new_tokens=30, ignore_eos=True)
    harness.submit("b", prompt(10, 20), max_new_tokens=30, ignore_eos=True)
    harness.turn()
    assert harness.running() == ["a"]
    harness.drain()
    assert not harness.recorder.retractions


def test_a_burst_on_an_idle_engine_is_looked_at_again_once_its_first_ones_run() -> None:
    """Newcomers reserve all they may generate, running ones 70 % of it: the second pass finds room
    for one more."""
    harness = Harness(num_pages=40)
    for number, rid in enumerate("abc"):
        harness.submit(rid, prompt(4, 10 + number), max_new_tokens=16)
    harness.turn()
    assert harness.running() == ["a"]
    harness.turn()
    assert harness.running() == ["a", "b"]
    harness.turn()
    assert harness.waiting() == ["c"]
    harness.drain()
