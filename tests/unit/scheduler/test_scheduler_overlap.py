"""The loop at depths 0, 1 and 2: stops, aborts, retractions and grammar masks while rows are in
flight."""

from __future__ import annotations

import numpy as np
import pytest

from setpoint.core.control import CacheFlush, FlushCache, GetState, InternalState
from setpoint.core.messages import Abort, Reply, Shutdown
from setpoint.core.records import PoolRebuilt
from setpoint.core.request import Ids, Request
from setpoint.scheduler.loop import StrictAccountingError
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.preparers import ScriptedPreparer
from setpoint_testing.scripted import hashed_token, reference

DEPTHS = pytest.mark.parametrize(("depth", "replan"), [(0, True), (1, True), (2, True), (2, False)])
EOS = frozenset({0, 1, 2, 3, 4, 5})


def prompt(length: int, first: int = 10) -> list[int]:
    return [first, *((first * 7 + index) % VOCAB for index in range(length - 1))]


def expected(
    length: int, first: int, num_new: int, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    return reference(
        np.array(prompt(length, first), np.int32), num_new, hashed_token(VOCAB), stop_ids
    )


@DEPTHS
def test_tokens_do_not_depend_on_depth(depth: int, replan: bool) -> None:
    harness = Harness(
        num_pages=200,
        depth=depth,
        replan_inflight=replan,
        eos_token_ids=EOS,
        chunked_prefill_size=6,
    )
    for number in range(6):
        harness.submit(f"r{number}", prompt(9 + number, 10 + number), max_new_tokens=25)
        harness.turn(2)
    harness.drain()
    for number in range(6):
        assert harness.outcomes[f"r{number}"].ids == expected(9 + number, 10 + number, 25, EOS)


def test_depth_steps_are_in_flight_while_the_next_is_planned() -> None:
    for depth in (0, 1, 2):
        harness = Harness(depth=depth)
        harness.submit("a", prompt(4), max_new_tokens=10)
        harness.turn(4)
        assert len(harness.scheduler.state.inflight) == depth


def test_a_pipeline_does_not_plan_a_sequence_twice() -> None:
    harness = Harness(depth=2, replan_inflight=False)
    harness.submit("a", prompt(4), max_new_tokens=6)
    for _ in range(20):
        harness.turn()
        assert harness.scheduler.state.is_idle or harness.sequence("a").inflight_steps <= 1
    assert len(harness.outcomes["a"].ids) == 6


@DEPTHS
def test_no_row_is_planned_past_the_length_limit(depth: int, replan: bool) -> None:
    harness = Harness(depth=depth, replan_inflight=replan)
    harness.submit("a", prompt(4), max_new_tokens=5)
    harness.drain()
    assert len(harness.plans) == 5


@DEPTHS
def test_a_stop_wastes_at_most_depth_rows(depth: int, replan: bool) -> None:
    harness = Harness(depth=depth, replan_inflight=replan, eos_token_ids=EOS)
    harness.submit("a", prompt(4), max_new_tokens=60)
    harness.drain()
    useful = len(harness.outcomes["a"].ids)
    assert useful == len(expected(4, 10, 60, EOS)) < 60
    assert useful <= len(harness.plans) <= useful + depth


@DEPTHS
def test_slot_and_pages_of_an_aborted_sequence_are_held_until_its_rows_are_back(
    depth: int, replan: bool
) -> None:
    harness = Harness(depth=depth, replan_inflight=replan, max_running_requests=1)
    harness.submit("a", prompt(4, 10), max_new_tokens=30)
    harness.submit("b", prompt(4, 20), max_new_tokens=5)
    harness.turn(5)
    in_flight = harness.sequence("a").inflight_steps
    assert bool(in_flight) == bool(depth)
    harness.scheduler.abort(Abort([harness.seq_id("a")]))
    assert bool(harness.scheduler.state.draining) == bool(in_flight)
    harness.drain()
    assert harness.outcomes["b"].ids == expected(4, 20, 5)


@DEPTHS
def test_a_rid_can_be_used_again_at_once_after_an_abort(depth: int, replan: bool) -> None:
    harness = Harness(depth=depth, replan_inflight=replan)
    harness.submit("a", prompt(4, 10), max_new_tokens=30)
    harness.turn(4)
    harness.stop("a")
    harness.submit("a", prompt(4, 20), max_new_tokens=5)
    harness.drain()
    assert harness.outcomes["a"].ids == expected(4, 20, 5)


@DEPTHS
def test_retraction_while_rows_are_in_flight_waits_for_them(depth: int, replan: bool) -> None:
    harness = Harness(num_pages=60, depth=depth, replan_inflight=replan, conservativeness=0.01)
    for number in range(4):
        harness.submit(f"r{number}", prompt(6, 10 + number), max_new_tokens=30)
        harness.turn()
    harness.drain()
    assert harness.recorder.retractions
    for number in range(4):
        assert harness.outcomes[f"r{number}"].ids == expected(6, 10 + number, 30)


@DEPTHS
def test_chunks_of_one_prompt_may_be_in_flight_together(depth: int, replan: bool) -> None:
    harness = Harness(depth=depth, replan_inflight=replan, chunked_prefill_size=5)
    harness.submit("a", prompt(31), max_new_tokens=4)
    harness.drain()
    assert harness.outcomes["a"].ids == expected(31, 10, 4)


class EvenOdd:
    """Allows even tokens after an even number of tokens, odd ones after an odd number; ends after
    seven."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept(self, token: int) -> None:
        assert token % 2 == len(self.accepted) % 2, "a token that the mask forbade"
        self.accepted.append(token)

    def fill_mask(self, words: Ids) -> None:
        allowed = np.zeros(len(words) * 32, np.uint8)
        allowed[len(self.accepted) % 2 : VOCAB : 2] = 1
        words[:] = np.packbits(allowed, bitorder="little").view(np.int32)

    @property
    def terminated(self) -> bool:
        return len(self.accepted) == 7


@DEPTHS
def test_grammar_masks_see_every_earlier_token(depth: int, replan: bool) -> None:
    grammars: dict[str, EvenOdd] = {}

    def make(request: Request) -> EvenOdd:
        return grammars.setdefault(request.rid, EvenOdd())

    preparer = ScriptedPreparer(make, needs=lambda request: request.rid.startswith("g"))
    harness = Harness(depth=depth, replan_inflight=replan, preparer=preparer)
    for number in range(3):
        harness.submit(f"g{number}", prompt(5, 10 + number), max_new_tokens=30)
        harness.submit(f"free{number}", prompt(5, 20 + number), max_new_tokens=9)
    harness.drain()
    for number in range(3):
        outcome = harness.outcomes[f"g{number}"]
        assert [token % 2 for token in outcome.ids] == [0, 1, 0, 1, 0, 1, 0]
        assert outcome.finish is not None
        assert outcome.finish.type == "stop"
        assert harness.outcomes[f"free{number}"].ids == expected(5, 20 + number, 9)


def test_a_resumed_request_replays_its_outputs_through_the_grammar() -> None:
    grammar = EvenOdd()
    harness = Harness(preparer=ScriptedPreparer(lambda request: grammar))
    harness.submit("a", prompt(5), prior=[2, 1, 4], max_new_tokens=30)
    harness.drain()
    assert grammar.accepted[:3] == [2, 1, 4]
    assert len(harness.outcomes["a"].ids) == 4


def test_control_calls_are_answered() -> None:
    harness = Harness()
    harness.submit("a", prompt(8), max_new_tokens=3)
    harness.wire.inbox.append(FlushCache(1))
    harness.turn()
    assert harness.replies[-1] == Reply(1, CacheFlush(False, 0))
    harness.drain()
    harness.wire.inbox += [FlushCache(2), GetState(3)]
    harness.turn()
    flushed, state = harness.replies[-2:]
    assert flushed == Reply(2, CacheFlush(True, 10))
    assert isinstance(state.answer, InternalState)
    assert (state.id, state.answer.num_running) == (3, 0)
    assert harness.cache.free_tokens == harness.cache.total_tokens


def test_shutdown_ends_the_loop() -> None:
    harness = Harness()
    harness.wire.inbox.append(Shutdown())
    harness.loop.run()


def test_a_leak_found_idle_is_repaired_and_the_server_goes_on() -> None:
    harness = Harness(num_pages=64)
    harness.submit("a", prompt(8), max_new_tokens=3)
    harness.drain()
    harness.turn()
    assert not harness.recorder.of(PoolRebuilt)
    harness.submit("b", prompt(8), max_new_tokens=3)
    harness.loop.step()
    harness.cache.alloc(5)  # lost
    while not harness.scheduler.state.is_idle:
        harness.loop.step()
    harness.loop.step()
    (rebuilt,) = harness.recorder.of(PoolRebuilt)
    assert "5" in "".join(rebuilt.violations)
    assert harness.cache.free_tokens == harness.cache.total_tokens
    harness.submit("c", prompt(8), max_new_tokens=3)
    harness.drain()
    assert harness.outcomes["c"].ids == expected(8, 10, 3)


def test_strict_accounting_stops_at_the_first_inconsistent_step() -> None:
    harness = Harness(strict_accounting=True)
    harness.submit("a", prompt(8), max_new_tokens=9)
    harness.turn(2)
    harness.cache.alloc(1)
    with pytest.raises(StrictAccountingError, match="private tokens"):
        harness.loop.step()
