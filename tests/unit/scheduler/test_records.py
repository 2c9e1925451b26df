"""The stream: every kind of record is written by what it tells of, the lives of requests are told
however they end, and readers only read."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from setpoint.core.control import Change, FlushCache, PauseMode
from setpoint.core.grammar import NotReady
from setpoint.core.messages import PagesMoved, Tokens
from setpoint.core.operations import MemoryPart, RestoreMemory
from setpoint.core.records import (
    CacheFlushed,
    Continued,
    Fallback,
    GrammarEnded,
    GrammarLate,
    HandedOver,
    Operated,
    Paused,
    PoolRebuilt,
    Preemption,
    PreparationEnded,
    PreparationStarted,
    Received,
    Record,
    RequestAdmitted,
    RequestClipped,
    RequestDone,
    Rested,
    ResultTaken,
    Retraction,
    SendFailed,
    SettingsChanged,
    StepDone,
    StepLost,
    StepPlanned,
    TokensForced,
    TransferEnded,
    TransferStarted,
    Turn,
    TurnDone,
)
from setpoint.core.request import Ids
from setpoint.core.settings import PrioritySettings
from setpoint.core.transfers import KVLocation
from setpoint.observe.figures import Figures
from setpoint.observe.tee import Tee
from setpoint_testing.harness import TURN_S, Harness, ids_of
from setpoint_testing.lacking import Lacking
from setpoint_testing.preparers import ScriptedPreparer
from setpoint_testing.simulation.handover import Faults, Run

PROMPT = [1, 2, 3, 4]


def served() -> Harness:
    harness = Harness()
    harness.submit("a", PROMPT)
    harness.drain()
    return harness


def retracted() -> Harness:
    """Three are admitted who cannot all end side by side, while a fourth waits."""
    harness = Harness(num_pages=40, max_running_requests=3, conservativeness=0.01)
    for number in range(4):
        harness.submit(f"r{number}", [number] * 5, max_new_tokens=20)
        harness.turn()
    harness.drain()
    return harness


def preempted() -> Harness:
    harness = Harness(max_running_requests=1, priority=PrioritySettings(default=0))
    harness.submit("idle", PROMPT, max_new_tokens=20)
    harness.turn(3)
    harness.submit("urgent", PROMPT, priority=100)
    harness.drain()
    return harness


def clipped() -> Harness:
    harness = Harness(num_pages=32)
    harness.submit("a", PROMPT, max_new_tokens=1000)
    harness.drain()
    return harness


def ignoring_priorities() -> Harness:
    harness = Harness()
    harness.submit("a", PROMPT, priority=3)
    harness.drain()
    return harness


def flushed() -> Harness:
    harness = served()
    harness.wire.inbox.append(FlushCache(1))
    harness.turn()
    return harness


def changed() -> Harness:
    harness = Harness()
    harness.wire.inbox.append(Change(1, harness.settings, (), by="somebody", why="a test"))
    harness.turn()
    return harness


def paused() -> Harness:
    harness = Harness()
    harness.pause(PauseMode.ABORT)
    harness.resume()
    harness.turn()
    return harness


def operated() -> Harness:
    harness = Harness()
    harness.operate(RestoreMemory([MemoryPart.WEIGHTS]))
    harness.turn()
    return harness


def leaking() -> Harness:
    """A page that nobody will give back."""
    harness = Harness(strict_accounting=False)
    harness.submit("a", PROMPT, max_new_tokens=2)
    harness.turn(2)
    assert harness.cache.alloc(1) is not None
    harness.loop.step()
    return harness


def losing_an_answer() -> Harness:
    harness = Harness()
    send = harness.wire.send

    def refuse_ids(message: object) -> None:
        if isinstance(message, Tokens) and any(event.ids for event in message.events):
            raise OverflowError("an integer beyond 64 bits")
        send(message)  # type: ignore[arg-type]

    harness.wire.send = refuse_ids  # type: ignore[method-assign]
    harness.submit("a", PROMPT, max_new_tokens=1)
    harness.drain()
    return harness


class Finished:
    """A grammar that admits one token."""

    terminated = False

    def accept(self, token: int) -> None:
        self.terminated = True

    def fill_mask(self, words: Ids) -> None:
        words[:] = -1


def constrained() -> Harness:
    harness = Harness(preparer=ScriptedPreparer(lambda request: Finished()))
    harness.submit("a", PROMPT)
    harness.drain()
    return harness


class One(Finished):
    """A grammar that allows one token, again and again."""

    def accept(self, token: int) -> None:
        pass

    def fill_mask(self, words: Ids) -> None:
        words[0] = 2


def forcing() -> Harness:
    harness = Harness(preparer=ScriptedPreparer(lambda request: One()))
    harness.submit("a", PROMPT)
    harness.drain()
    return harness


class Late(One):
    """A grammar that is late after every token."""

    def __init__(self) -> None:
        self._is_ready = True

    def accept(self, token: int) -> None:
        self._is_ready = False

    @property
    def terminated(self) -> bool:
        if not self._is_ready:
            raise NotReady
        return False

    def make_ready(self) -> None:
        self._is_ready = True


def late() -> Harness:
    harness = Harness(preparer=ScriptedPreparer(lambda request: Late()))
    harness.submit("a", PROMPT)
    harness.drain()
    return harness


def loading() -> Harness:
    harness = Harness()
    transfers = harness.scheduler.state.transfers
    load = transfers.reserve(KVLocation.STORAGE, ids_of(PROMPT), "", lambda *_: None)
    assert load is not None
    harness.wire.post(PagesMoved(load.id, len(PROMPT)))
    harness.turn()
    return harness


def losing_a_step() -> Harness:
    harness = Harness(executor=Lacking({1}, "forward", num_pages=64, page_size=1))
    harness.submit("a", PROMPT, max_new_tokens=3)
    harness.drain()
    return harness


def handing_over() -> Harness:
    run = Run(0, Faults())
    run.run(1)
    return run.decode


PROVOKED_BY: dict[type[Record], Callable[[], Harness]] = {
    Turn: served,
    Received: served,
    StepPlanned: served,
    ResultTaken: served,
    StepDone: served,
    TurnDone: served,
    RequestAdmitted: served,
    RequestDone: served,
    Retraction: retracted,
    Preemption: preempted,
    RequestClipped: clipped,
    Fallback: ignoring_priorities,
    CacheFlushed: flushed,
    SettingsChanged: changed,
    Paused: paused,
    Operated: operated,
    Continued: paused,
    Rested: leaking,
    PoolRebuilt: leaking,
    PreparationStarted: constrained,
    PreparationEnded: constrained,
    TransferStarted: loading,
    TransferEnded: loading,
    HandedOver: handing_over,
    GrammarEnded: constrained,
    GrammarLate: late,
    TokensForced: forcing,
    SendFailed: losing_an_answer,
    StepLost: losing_a_step,
}


def test_every_kind_of_record_has_something_that_provokes_it() -> None:
    assert set(PROVOKED_BY) == set(get_args(Record))


@pytest.mark.parametrize("kind", PROVOKED_BY, ids=lambda kind: kind.__name__)
def test_what_happens_is_recorded(kind: type[Record]) -> None:
    assert PROVOKED_BY[kind]().recorder.of(kind)


def test_the_order_of_a_life() -> None:
    """Inputs stand before what follows from them, and an end before the step that brought it."""
    harness = Harness()
    harness.submit("a", PROMPT, max_new_tokens=1)
    harness.turn()
    kinds = [type(record) for record in harness.recorder.records]
    assert kinds == [
        Turn,
        Received,
        RequestAdmitted,
        StepPlanned,
        ResultTaken,
        RequestDone,
        StepDone,
        TurnDone,
    ]


def test_the_times_of_a_request() -> None:
    """It waits two turns for the slot, and is sent back once: the times are those of the first
    time."""
    harness = Harness(max_running_requests=1, priority=PrioritySettings(default=0))
    harness.submit("before", PROMPT, max_new_tokens=2)
    harness.submit("a", [*PROMPT, 5], max_new_tokens=4, prior=[9])
    harness.turn(4)
    harness.submit("urgent", PROMPT, priority=100, max_new_tokens=2)
    harness.drain()
    (life,) = [done for done in harness.recorder.of(RequestDone) if done.rid == "a"]
    assert life.accepted_at is not None
    assert life.admitted_at is not None
    assert life.first_token_at is not None
    assert life.admitted_at - life.accepted_at == pytest.approx(2 * TURN_S, rel=0.1)
    assert 0 < life.first_token_at - life.admitted_at < TURN_S
    assert life.ended_at - life.first_token_at == pytest.approx(4 * TURN_S, rel=0.1)
    assert (life.num_prompt, life.num_outputs, life.num_retractions) == (5, 3, 1)
    again = [each for each in harness.recorder.of(RequestAdmitted) if each.rid == "a"]
    assert [each.num_retractions for each in again] == [0, 1]
    assert [each.waited_s for each in again] == pytest.approx([2 * TURN_S] * 2, rel=0.1)
    assert (again[0].num_cached, life.num_cached) == (4, 4)


def test_the_life_of_a_request_that_never_ran() -> None:
    """Refused on arrival, complete on arrival, dropped, aborted, stopped."""
    harness = Harness(max_running_requests=1, max_queued_requests=3, waiting_timeout_s=5.0)
    harness.submit("running", PROMPT, max_new_tokens=20)
    harness.turn()
    for rid in ("late", "aborted", "stopped", "full"):
        harness.submit(rid, PROMPT)
    harness.submit("complete", PROMPT, prior=[1, 2], max_new_tokens=2)
    harness.submit("long", [1] * 60)
    harness.turn()
    harness.abort("aborted")
    harness.stop("stopped")
    harness.turn()
    harness.clock.advance(6.0)
    harness.turn()
    lives = {done.rid: done for done in harness.recorder.of(RequestDone)}
    assert {rid: (life.finish.type, life.finish.status_code) for rid, life in lives.items()} == {
        "full": ("abort", 503),
        "complete": ("length", None),
        "long": ("abort", 400),
        "aborted": ("abort", None),
        "stopped": ("stop", None),
        "late": ("abort", 503),
    }
    refused = {rid for rid, life in lives.items() if life.accepted_at is None}
    assert refused == {"full", "complete", "long"}
    assert all(life.num_outputs == 0 and life.admitted_at is None for life in lives.values())
    assert lives["long"].num_prompt == 60


def test_a_reader_must_not_raise() -> None:
    """Nobody catches it: what cannot be told must not be lost in silence."""

    class Broken:
        def on(self, record: Record) -> None:
            raise ZeroDivisionError

    harness = Harness()
    harness.loop._observer = Tee(harness.recorder, Broken())
    harness.submit("a", PROMPT)
    with pytest.raises(ZeroDivisionError):
        harness.turn()


def figures_of(harness: Harness, *, interval: int = 2) -> Figures:
    figures = Figures(decode_log_interval=interval)
    for record in harness.recorder.records:
        figures.on(record)
    return figures


def test_totals_add_up() -> None:
    harness = retracted()
    for rid in ("new", "again"):
        harness.submit(rid, [8] * 6)
        harness.drain()
    harness.submit("long", [1] * 60)
    harness.drain()
    figures, records = figures_of(harness), harness.recorder
    totals, lives = figures.totals, records.of(RequestDone)
    assert totals.steps == {"eager": len(harness.plans)}
    assert totals.output_tokens == sum(life.num_outputs for life in lives) == 4 * 20 + 2 * 4
    assert totals.prompt_tokens + totals.cached_tokens == sum(
        len(admit.ids) for plan in harness.plans for admit in plan.admits
    )
    assert totals.ended == {"length": 6, "400": 1}
    assert totals.retracted == totals.admissions - 6 > 0
    assert totals.refusals["no_slot"] > 0
    accepted = [life for life in lives if life.accepted_at is not None]
    assert totals.queue_s + totals.decode_s < sum(
        life.ended_at - (life.accepted_at or 0.0) for life in accepted
    )
    assert 0 < figures.report().cache_hit_rate < 1
    assert figures.report().new_token_ratio == records.steps[-1].new_token_ratio


def test_throughput_is_of_the_last_decode_steps() -> None:
    harness = Harness()
    for rid in ("a", "b"):
        harness.submit(rid, PROMPT, max_new_tokens=6)
    harness.drain()
    figures = figures_of(harness, interval=5)
    # Two prompts' first tokens in the first turn, then five steps of two.
    assert figures.decode_is_due
    assert figures.gen_throughput == pytest.approx(12 / (5 * TURN_S), rel=0.1)
    harness.submit("c", [9, 8, 7], max_new_tokens=1)
    harness.drain()
    assert figures_of(harness).input_throughput == pytest.approx(3 / (6 * TURN_S), rel=0.1)


def test_a_fallback_is_kept_with_its_reason() -> None:
    (words,) = figures_of(ignoring_priorities()).report().fallbacks
    assert words == "priorities do not order the queue (--enable-priority-scheduling is off)"
