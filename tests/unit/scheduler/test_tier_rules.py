"""Loads and saves as the scheduler decides them: what is loaded is computed nowhere, every end gives
the pages back, and a late writer meets nobody's pages."""

from __future__ import annotations

import random

import numpy as np
import pytest

from setpoint.core.control import FlushCache, PauseMode
from setpoint.core.messages import PagesMoved, PrefixFound
from setpoint.core.operations import MemoryPart, ReleaseMemory, RestoreMemory
from setpoint.core.pagerows import PageRow, WindowColumns
from setpoint.core.plan import StepPlan
from setpoint.core.prefix_digest import grown, split
from setpoint.core.preparation import Need
from setpoint.core.records import Fallback, PreparationEnded, PreparationStarted, TransferEnded
from setpoint.core.request import pack_ids
from setpoint.core.transfers import Transfer
from setpoint.scheduler.scheduler_config import TierConfig
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.movers import Key
from setpoint_testing.operators import ScriptedOperator
from setpoint_testing.scripted import (
    ScriptedExecutor,
    ScriptedStep,
    hashed_token,
    reference,
)

TIERS = TierConfig(block=8, threshold=16)
PROMPT = [(7 * at) % VOCAB for at in range(41)]


def expected(prompt: list[int], num_new: int = 4) -> list[int]:
    return reference(np.array(prompt, np.int32), num_new, hashed_token(VOCAB))


def served(**config: object) -> dict[Key, np.ndarray]:
    """What an engine leaves behind that has answered PROMPT."""
    h = Harness(tiers=TIERS, **config)  # type: ignore[arg-type]
    h.submit("a", PROMPT)
    h.drain()
    assert h.outcomes["a"].ids == expected(PROMPT)
    assert h.mover is not None
    return h.mover.stored


def digests_of(ids: list[int]) -> list[bytes]:
    return split(grown(b"", pack_ids(ids), "", block=8))


def next_engine(stored: dict[Key, np.ndarray], **config: object) -> Harness:
    return Harness(**({"tiers": TIERS} | config), stored=stored)  # type: ignore[arg-type]


def outcomes(h: Harness) -> list[str]:
    return [each.outcome for each in h.recorder.of(PreparationEnded)]


@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_the_next_engine_computes_only_the_rest(page_size: int) -> None:
    stored = served(page_size=page_size)
    assert len(stored) == 5, "the prompt and three outputs are 44 tokens"
    h = next_engine(stored, page_size=page_size)
    h.submit("b", PROMPT)
    h.drain()
    assert h.outcomes["b"].ids == expected(PROMPT)
    assert h.outcomes["b"].num_cached == 40
    assert sum(step.num_new_tokens for step in h.recorder.steps) == 1
    assert outcomes(h) == ["loaded"]
    assert h.recorder.of(PreparationStarted)[0].need is Need.CACHE


def test_namespaces_share_nothing() -> None:
    h = next_engine(served())
    h.submit("b", PROMPT, namespace="other")
    h.drain()
    assert (h.outcomes["b"].num_cached, h.outcomes["b"].ids) == (0, expected(PROMPT))
    assert outcomes(h) == ["missed"]


def test_a_short_prompt_and_a_cached_one_ask_nobody() -> None:
    h = next_engine(served())
    h.submit("short", PROMPT[:15])
    h.submit("b", PROMPT)
    h.drain()
    h.submit("again", PROMPT)
    h.drain()
    assert outcomes(h) == ["loaded"]


@pytest.mark.parametrize("arrives", [0, 7, 8, 20, 39])
def test_what_arrives_in_part_is_used_in_part(arrives: int) -> None:
    h = next_engine(served())
    assert h.mover is not None
    h.mover.spoil = lambda num_tokens: arrives
    h.submit("b", PROMPT)
    h.drain()
    assert h.outcomes["b"].ids == expected(PROMPT)
    assert h.outcomes["b"].num_cached == arrives // 8 * 8
    assert h.recorder.of(TransferEnded)[0].num_missing == 40 - arrives // 8 * 8


def test_nobody_waits_for_a_load_and_an_aborted_one_keeps_its_pages() -> None:
    h = next_engine(served(), num_pages=96)
    assert h.mover is not None
    h.mover.hold = True
    h.submit("b", PROMPT)
    h.submit("other", [5] * 9)
    h.turn()
    h.mover.finish_next()  # the lookup
    h.turn(8)
    assert h.outcomes["other"].ids == expected([5] * 9)
    assert h.scheduler.state.cache.pool_stats().held >= 40
    h.abort("b")
    h.turn()
    assert h.outcomes["b"].finish is not None
    assert h.mover.cancelled
    assert h.scheduler.state.cache.pool_stats().held == 40, "until the mover has let go"
    h.submit("big", [3] * 60, max_new_tokens=1)
    h.turn(3)
    h.mover.hold = False
    while h.mover.waiting:
        h.mover.finish_next()
    h.drain()
    assert h.outcomes["big"].ids == expected([3] * 60, 1)
    assert h.scheduler.state.cache.pool_stats().held == 0


def test_a_time_limit_ends_the_wait_and_not_the_load() -> None:
    h = next_engine(served(), num_pages=128)
    assert h.mover is not None
    h.mover.hold = True
    h.submit("b", PROMPT)
    h.turn()
    h.mover.finish_next()
    h.turn()
    h.clock.advance(1.5)
    h.turn()  # it is stopped, and has a little time to say how far it came
    h.clock.advance(0.5)
    h.turn(8)
    assert h.outcomes["b"].ids == expected(PROMPT)
    assert outcomes(h) == ["timed_out"]
    assert h.scheduler.state.transfers
    h.mover.hold = False
    h.mover.finish_next()
    h.drain()


def test_a_store_that_does_not_answer_is_not_asked_for_ever() -> None:
    h = next_engine(served(), num_pages=400)
    assert h.mover is not None
    h.mover.hold = True
    for number in range(5):
        prompt = [number, *PROMPT]
        h.submit(str(number), prompt)
        h.turn()
        h.clock.advance(1.5)
        h.turn(9)
        assert h.outcomes[str(number)].ids == expected(prompt)
    assert outcomes(h) == ["timed_out"] * 3
    assert "3 times in a row" in h.recorder.of(Fallback)[0].why


def test_best_effort_does_not_wait_where_a_request_could_run() -> None:
    policy = TierConfig(block=8, threshold=16, prefetch_policy="best_effort")
    h = next_engine(served(), tiers=policy)
    assert h.mover is not None
    h.mover.hold = True
    h.submit("b", PROMPT)
    h.turn()
    h.mover.finish_next()
    h.turn()
    assert h.mover.cancelled
    h.mover.finish_next()
    h.mover.hold = False
    h.drain()
    assert (h.outcomes["b"].num_cached, h.outcomes["b"].ids) == (0, expected(PROMPT))


def test_two_requests_load_a_common_prefix_once() -> None:
    h = next_engine(served(), num_pages=128)
    h.submit("b", PROMPT)
    h.submit("c", [*PROMPT, 1])
    h.drain()
    assert [h.outcomes[rid].num_cached for rid in "bc"] == [40, 41]
    loads = [each for each in h.recorder.of(TransferEnded) if each.direction == "load"]
    assert [each.num_tokens for each in loads] == [40]


@pytest.mark.parametrize("when", ["lookup", "load", "save"])
def test_a_flush_overtakes_what_is_on_its_way(when: str) -> None:
    h = next_engine({} if when == "save" else served(), num_pages=128)
    assert h.mover is not None
    h.mover.hold = True
    h.submit("b", PROMPT)
    h.turn()
    if when == "load":
        h.mover.finish_next()
        h.turn()
    if when == "save":
        h.mover.finish_next()
        h.turn(12)
        assert h.scheduler.state.transfers
    h.pause(PauseMode.RETRACT)
    h.wire.post(FlushCache(1))
    h.resume()
    h.turn()
    pool = h.scheduler.state.cache.pool_stats()
    assert (pool.evictable, pool.locked) == (0, 0)
    h.mover.hold = False
    while h.mover.waiting:
        h.mover.finish_next()
        h.turn()
    h.drain()
    assert h.outcomes["b"].ids == expected(PROMPT)
    if when == "load":
        assert h.outcomes["b"].num_cached == 0


def test_nothing_is_loaded_into_memory_that_is_given_back() -> None:
    """Red before: the load ended the engine, because the pool had no pages to fill."""
    h = next_engine(served(), operator=ScriptedOperator())
    assert h.mover is not None
    h.mover.hold = True
    h.operate(ReleaseMemory([MemoryPart.KV_CACHE]))
    h.submit("b", PROMPT)
    h.turn()
    h.mover.finish_next()  # the lookup
    h.turn(3)
    assert not h.mover.waiting, "a load into no memory"
    h.operate(RestoreMemory([MemoryPart.KV_CACHE]))
    h.turn(3)
    assert h.mover.waiting
    h.mover.hold = False
    h.mover.finish_next()
    h.drain()
    assert (h.outcomes["b"].num_cached, h.outcomes["b"].ids) == (40, expected(PROMPT))


@pytest.mark.parametrize("turns", range(14))
def test_a_save_reads_nothing_that_a_step_is_still_computing(turns: int) -> None:
    """Red before with steps planned ahead: where another prompt goes on with the outputs of a request
    that is ending, the tree has the pages of that prompt, which are not computed yet."""
    h = Harness(tiers=TIERS, depth=1, num_pages=300)
    assert isinstance(h.executor, ScriptedExecutor)
    assert h.mover is not None
    being_written: list[list[int]] = []
    submit, save = h.executor.submit, h.mover.save

    def submitted(plan: StepPlan) -> ScriptedStep:
        step = submit(plan)
        pages = plan.pages.pages.ravel().tolist()
        being_written.append(pages)
        result = step.result
        step.result = lambda: being_written.remove(pages) or result()  # type: ignore[method-assign]
        return step

    def saved(transfer: Transfer) -> None:
        assert not {*transfer.rows.tolist()} & {page for each in being_written for page in each}
        save(transfer)

    h.executor.submit, h.mover.save = submitted, saved  # type: ignore[method-assign]
    h.submit("a", PROMPT, max_new_tokens=12)
    h.turn(turns)
    longer = [*PROMPT, *expected(PROMPT, 12), 1, 2, 3]
    h.submit("b", longer)
    h.drain()
    assert [h.outcomes[rid].ids for rid in "ab"] == [expected(PROMPT, 12), expected(longer)]


def test_messages_of_what_has_ended_change_nothing() -> None:
    h = next_engine(served())
    h.wire.post(PrefixFound(3, 40))
    h.wire.post(PagesMoved(7, 40))
    h.submit("b", PROMPT)
    h.drain()
    h.wire.post(PagesMoved(1, 40))
    h.turn()
    assert h.outcomes["b"].ids == expected(PROMPT)


def test_what_is_not_stored_any_more_is_saved_again() -> None:
    """Red before: after another server's clear, or an eviction, a block was never saved again."""
    h = Harness(tiers=TIERS, num_pages=128)
    assert h.mover is not None
    h.submit("a", PROMPT)
    h.drain()
    before = set(h.mover.stored)
    for key in before - {*digests_of(PROMPT)[:2]}:
        del h.mover.stored[key]
    h.submit("large", [3] * 120, max_new_tokens=1)  # takes the pool
    h.drain()
    h.submit("b", PROMPT)
    h.drain()
    assert h.outcomes["b"].ids == expected(PROMPT)
    assert before <= set(h.mover.stored)


def test_selective_saves_what_comes_back() -> None:
    h = Harness(tiers=TierConfig(block=8, threshold=16, write_policy="write_through_selective"))
    assert h.mover is not None
    for number, count in enumerate((0, 5, 5)):
        h.submit(str(number), PROMPT)
        h.drain()
        assert len(h.mover.stored) == count


def test_write_back_saves_before_it_evicts() -> None:
    policy = TierConfig(block=8, threshold=16, write_policy="write_back")
    h = Harness(tiers=policy, num_pages=150)
    assert h.mover is not None
    for number in range(12):
        h.submit(str(number), [number, *PROMPT[1:]], max_new_tokens=1)
        h.drain()
    first_blocks = [digests_of([number, *PROMPT[1:]])[0] for number in range(12)]
    lost = set(first_blocks) - set(h.mover.stored)
    assert len(lost) <= 4, "those that the pool still has"


def test_what_cannot_be_stored_is_offered_once_before_it_is_evicted() -> None:
    policy = TierConfig(block=8, threshold=16, write_policy="write_back")
    h = Harness(tiers=policy, num_pages=150)
    assert h.mover is not None
    refused: list[int] = []

    def refuse(transfer: Transfer) -> None:
        refused.append(transfer.id)
        h.mover.post(PagesMoved(transfer.id, 0, 0, 0.001, "the tiers are off"))  # type: ignore[union-attr]

    h.mover.save = refuse  # type: ignore[method-assign]
    for number in range(4):
        h.submit(str(number), [number, *PROMPT[1:]], max_new_tokens=1)
        h.drain()
    for _ in range(50):
        h.turn()
    assert 0 < len(refused) <= 4


def test_saving_that_never_pays_ends_but_for_what_comes_back() -> None:
    h = Harness(tiers=TIERS, num_pages=400)
    assert h.mover is not None
    h.mover.seconds = 6.0
    for number in range(8):
        h.submit(str(number), [number, *PROMPT[1:]], max_new_tokens=1)
        h.drain()
    (told,) = h.recorder.of(Fallback)
    assert "used twice" in told.what
    before = len(h.mover.stored)
    assert before < 8 * 5
    h.submit("new", [90, *PROMPT[1:]], max_new_tokens=1)
    h.drain()
    assert len(h.mover.stored) == before
    h.submit("again", [90, *PROMPT[1:]], max_new_tokens=1)
    h.drain()
    assert len(h.mover.stored) == before + 5


@pytest.mark.parametrize("seed", range(40))
def test_random_traffic_gives_the_tokens_of_each_request_alone(seed: int) -> None:
    """Small pools, transfers that end late, in any order, in part or cancelled, and aborts."""
    rng = random.Random(seed)
    row = rng.choice([PageRow(), PageRow(1, (WindowColumns(9, 1, 3),), read_step=2)])
    stored: dict[Key, np.ndarray] = {}
    for life in range(3):
        h = Harness(
            tiers=TierConfig(
                block=8,
                threshold=8,
                write_policy=rng.choice(["write_through", "write_back"]),
                prefetch_policy=rng.choice(["timeout", "best_effort", "wait_complete"]),
            ),
            stored=stored,
            num_pages=200 * row.width // rng.choice([1, 2]) // 2,
            page_size=rng.choice([1, 2, 4]) if life == 0 else h.cache.page_size,  # noqa: F821
            row=row,
            depth=rng.choice([0, 1]),
            chunked_prefill_size=rng.choice([None, 16]),
        )
        assert h.mover is not None
        h.mover.hold = True
        h.mover.spoil = lambda num: rng.choice([num, num, rng.randrange(num + 1)])
        prompts: dict[str, list[int]] = {}
        for number in range(14):
            prompt = [rng.randrange(2)] * rng.randrange(1, 30) + [rng.randrange(4)] * 9
            prompts[f"{life}.{number}"] = prompt
            h.submit(f"{life}.{number}", prompt, max_new_tokens=rng.randrange(1, 5))
            for _ in range(rng.randrange(6)):
                if h.mover.waiting and rng.random() < 0.7:
                    h.mover.finish_next(rng.randrange(len(h.mover.waiting)))
                if rng.random() < 0.05:
                    h.abort(rng.choice(list(prompts)))
                h.clock.advance(rng.choice([0.0, 0.0, 0.4]))
                h.turn()
        h.mover.hold = False
        while h.mover.waiting:
            h.mover.finish_next()
        h.drain()
        for rid, prompt in prompts.items():
            outcome = h.outcomes[rid]
            assert outcome.finish is not None
            if outcome.finish.type != "abort":
                assert outcome.ids == expected(prompt, len(outcome.ids)), rid
        pool = h.cache.pool_stats()
        assert pool.free + pool.evictable == pool.total
