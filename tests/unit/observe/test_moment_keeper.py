"""Moments that an engine keeps: they lose nothing, follow one another without gaps, and are bounded."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest

from setpoint.core.control import GetMoments, Moments, PauseMode
from setpoint.core.messages import Reply, decode_to_frontend, encode
from setpoint.core.moments import Moment, merge, quantile
from setpoint.core.records import Record, RequestDone, StepDone, Turn, TurnDone
from setpoint.observe.figures import Figures
from setpoint.observe.moment_keeper import MomentKeeper
from setpoint_testing.harness import Harness


def kept(records: list[Record], **arguments: float) -> list[Moment]:
    keeper = MomentKeeper(kept=None, **arguments)
    for record in records:
        keeper.on(record)
    keeper.finish()
    return keeper.since(0).moments


def busy(seed: int) -> Harness:
    """Some minutes of an engine that is short of pages and slots, with pauses and idle times."""
    chance = random.Random(seed)
    harness = Harness(num_pages=40, max_running_requests=3, conservativeness=0.01)
    for number in range(40):
        prompt = [chance.randrange(5)] * chance.randrange(1, 12)
        harness.submit(f"r{number}", prompt, max_new_tokens=chance.randrange(1, 25))
        harness.turn(chance.randrange(12))
        match chance.randrange(12):
            case 0:
                harness.clock.advance(chance.uniform(0.5, 40.0))
            case 1:
                harness.abort(f"r{number}")
            case 2:
                harness.drain()
                harness.clock.advance(chance.uniform(0.5, 40.0))
            case 3:
                harness.pause(PauseMode.RETRACT)
                harness.turn(2)
                harness.clock.advance(chance.uniform(0.5, 5.0))
                harness.resume()
        harness.clock.advance(chance.choice((0.0, 0.1, 0.4)))
    harness.drain()
    return harness


@pytest.mark.parametrize("seed", range(20))
def test_moments_lose_nothing(seed: int) -> None:
    """Their sums are the engine's totals."""
    harness = busy(seed)
    records = harness.recorder.records
    figures = Figures(decode_log_interval=40)
    for record in records:
        figures.on(record)
    totals, moments = msgspec.structs.asdict(figures.totals), kept(records)
    whole = merge(moments)
    assert whole.new_tokens == totals["prompt_tokens"]
    assert whole.cached_tokens == totals["cached_tokens"]
    assert whole.output_tokens == totals["output_tokens"]
    assert whole.refusals == totals["refusals"]
    assert whole.retracted == totals["retracted"]
    assert whole.ended == totals["ended"]
    assert whole.num_prefill + whole.num_decode == sum(totals["steps"].values())
    assert whole.graph_misses == whole.num_decode
    turns = harness.recorder.of(TurnDone)
    assert whole.busy_s == pytest.approx(sum(turn.turn_s for turn in turns))
    assert whole.model_s == pytest.approx(sum(turn.model_s for turn in turns))
    largest = max(step.num_running for step in harness.recorder.steps)
    assert whole.running_max == largest
    assert len(moments) > 5


@pytest.mark.parametrize("seed", range(5))
def test_moments_follow_one_another(seed: int) -> None:
    harness = busy(seed)
    turns = harness.recorder.of(Turn)
    moments = kept(harness.recorder.records, epoch=1_000_000.0)
    assert moments[0].at == pytest.approx(1_000_000.0 + turns[0].at)
    for before, after in pairwise(moments):
        assert after.at == pytest.approx(before.at + before.seconds)
    assert all(moment.seconds >= 1.0 - 1e-6 for moment in moments[:-1])
    # The last one ends with the last step.
    assert (
        moments[-1].at + moments[-1].seconds >= 1_000_000.0 + harness.recorder.steps[-1].finished_at
    )


def test_means_are_over_the_steps_of_a_moment() -> None:
    harness = Harness(max_running_requests=2)
    for rid in ("a", "b", "c"):
        harness.submit(rid, [1, 2, 3, 4], max_new_tokens=4)
    harness.turn(3)
    harness.clock.advance(2.0)
    harness.drain()
    first, *_ = kept(harness.recorder.records)
    steps = [step for step in harness.recorder.steps if step.finished_at < 1.0]
    assert len(steps) == 3
    assert (first.num_prefill, first.num_decode) == (1, 2)
    assert first.running == pytest.approx(sum(step.num_running for step in steps) / 3)
    assert (first.queue, first.queue_min, first.queue_max) == (1.0, 1.0, 1.0)
    assert first.usage == pytest.approx(sum(step.pool.usage for step in steps) / 3)
    assert first.gen_throughput == pytest.approx((first.output_tokens or 0) / first.seconds)
    assert first.refusals == {"no_slot": 3}
    assert first.largest_prefill == first.new_tokens == 8 - first.cached_tokens
    assert first.quantiles.keys() == {"wait_p50", "wait_p95"}


def test_a_time_without_steps_is_one_moment() -> None:
    harness = Harness()
    harness.submit("a", [1, 2], max_new_tokens=3)
    harness.drain()
    harness.clock.advance(100.0)
    harness.submit("b", [1, 2], max_new_tokens=3)
    harness.drain()
    busy, rest, again = kept(harness.recorder.records)
    assert (busy.num_decode, rest.num_decode, again.num_decode) == (2, 0, 2)
    assert busy.seconds == pytest.approx(1.0)
    assert rest.seconds == pytest.approx(99.0, abs=0.1)
    assert (rest.running, rest.queue, rest.gen_throughput) == (0.0, 0.0, 0.0)
    assert rest.refusals == {}
    assert rest.pool["locked"] + rest.pool["held"] == 0 < busy.pool["locked"] + busy.pool["held"]


def test_a_rest_shows_the_pool_as_it_is_and_not_as_the_last_step_left_it() -> None:
    """A client that leaves takes its pages from no step."""
    harness = Harness()
    harness.submit("a", [1, 2, 3, 4], max_new_tokens=30)
    harness.turn(4)
    harness.abort("a")
    harness.turn(2)
    harness.clock.advance(100.0)
    harness.submit("b", [5, 6], max_new_tokens=1)
    harness.drain()
    _, rest, _ = kept(harness.recorder.records)
    assert rest.pool["locked"] + rest.pool["held"] == 0
    assert rest.pool["free"] + rest.pool["evictable"] == rest.pool["total"]
    assert (rest.usage, rest.tokens) == (0.0, 0.0)


def test_a_pause_shows_what_it_holds() -> None:
    harness = Harness(max_running_requests=2)
    for number in range(5):
        harness.submit(f"r{number}", [1, 2], max_new_tokens=9)
    harness.turn(2)
    harness.pause(PauseMode.IN_PLACE)
    harness.turn()
    harness.clock.advance(10.0)
    harness.resume()
    harness.drain()
    rest = kept(harness.recorder.records)[1]
    assert (rest.running, rest.queue) == (2.0, 3.0)


def test_only_so_many_are_kept_and_each_has_its_number() -> None:
    harness = busy(1)
    everything, keeper = MomentKeeper(kept=None), MomentKeeper(kept=3)
    for record in harness.recorder.records:
        everything.on(record)
        keeper.on(record)
    whole = everything.since(0).moments
    finished = len(whole)
    assert keeper.since(0) == Moments(finished - 3, whole[finished - 3 : finished])
    assert keeper.since(finished - 1) == Moments(finished - 1, [whole[finished - 1]])
    assert keeper.since(finished) == Moments(finished, [])


def test_a_call_brings_them_over_the_link() -> None:
    harness = busy(2)
    keeper = MomentKeeper()
    for record in harness.recorder.records:
        keeper.on(record)
    harness.loop._moments = keeper.since
    harness.wire.post(GetMoments(7, 4))
    harness.turn()
    (reply,) = (reply for reply in harness.replies if reply.id == 7)
    received = decode_to_frontend(encode(reply))
    assert isinstance(received, Reply)
    assert received.answer == keeper.since(4)
    assert keeper.since(4).first == 4


def test_ends_and_steps_of_one_turn_are_in_one_moment() -> None:
    """A turn longer than a second belongs to the moment that it began in."""
    harness = Harness()
    harness.submit("a", [1, 2], max_new_tokens=1)
    harness.turn()
    records = harness.recorder.records
    late = [
        msgspec.structs.replace(record, finished_at=9.0) if isinstance(record, StepDone) else record
        for record in records
    ]
    (moment,) = kept([record for record in late if not isinstance(record, TurnDone)])
    assert moment.seconds == pytest.approx(9.0, abs=0.01)
    assert sum(moment.ended.values()) == len(harness.recorder.of(RequestDone)) == 1


def test_quantiles() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    assert [quantile(values, share) for share in (0.0, 0.25, 0.5, 0.51, 0.95, 1.0)] == [
        1,
        1,
        2,
        3,
        4,
        4,
    ]


def test_a_moment_with_steps_has_the_pool_as_it_was_while_they_ran() -> None:
    """The sequences of the last step had pages in it, although the step's end has freed them."""
    harness = Harness()
    for number in range(3):
        harness.submit(f"r{number}", [number] * 6, max_new_tokens=4)
    harness.drain()
    harness.clock.advance(100.0)
    harness.turn()
    ran, rest = kept(harness.recorder.records)[:2]
    assert ran.running_max == 3.0
    assert ran.pool["held"] + ran.pool["locked"] > 0
    assert (
        sum(ran.pool[name] for name in ("free", "evictable", "locked", "held"))
        == (ran.pool["total"])
    )
    assert (rest.running, rest.pool["held"], rest.pool["locked"]) == (0.0, 0, 0)
