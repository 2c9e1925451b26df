"""Prefill and decode engines with one store: each saves what it has computed, and the prefill engine
finds the whole history of a conversation."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.records import HandedOver, TransferStarted
from setpoint.core.transfers import Direction, KVLocation
from setpoint.scheduler.scheduler_config import TierConfig
from setpoint.scheduler.tiers import MAX_SAVES
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.movers import Key
from setpoint_testing.scripted import hashed_token, reference
from setpoint_testing.simulation.handover import Faults, Network

TIERS = TierConfig(block=8, threshold=16, prefetch_policy="wait_complete")
PROMPT = [(7 * at) % VOCAB for at in range(41)]
NUM_NEW = 20


class Engines:
    def __init__(self, stored: dict[Key, np.ndarray], **decode: object) -> None:
        """decode: fields of the decode engine's TierConfig."""
        self.network = network = Network(random.Random(3), Faults())
        sizes = {"num_pages": 400, "stored": stored, "handover_timeout_s": 30.0}
        self.prefill = network.prefill = Harness(
            handover={"giver": network}, role="prefill", tiers=TIERS, **sizes
        )
        own = replace(TIERS, limits_loss=False, **decode)  # type: ignore[arg-type]
        self.decode = network.decode = Harness(
            handover={"taker": network}, role="decode", mixed_chunk=True, tiers=own, **sizes
        )
        self._room = 0

    def answer(self, prompt: list[int], *, is_reached: bool = True) -> list[int]:
        """The tokens of a request on both engines. is_reached: whether the prefill engine gets it."""
        self._room += 1
        rid, bootstrap = f"r{self._room}", Bootstrap(self._room, "prefill", 1)
        for side in (self.prefill, self.decode):
            if is_reached or side is self.decode:
                side.submit(rid, prompt, max_new_tokens=NUM_NEW, bootstrap=bootstrap)
        for _ in range(4000):
            self.network.tick(0.05)
            for side in (self.prefill, self.decode):
                side.turn()
                side.clock.advance(0.05)
            state = self.decode.scheduler.state
            if self.decode.outcomes[rid].finish is not None and not state.transfers:
                return self.decode.outcomes[rid].ids
        raise AssertionError("no answer")


def expected(prompt: list[int]) -> list[int]:
    return reference(np.array(prompt, np.int32), NUM_NEW, hashed_token(VOCAB))


def moved(side: Harness, direction: Direction) -> list[tuple[int, int]]:
    """(start, tokens) of the transfers from or to the store."""
    return [
        (each.start, each.num_tokens)
        for each in side.recorder.of(TransferStarted)
        if each.place is KVLocation.STORAGE and each.direction is direction
    ]


def test_the_next_turn_finds_what_both_have_computed() -> None:
    stored: dict[Key, np.ndarray] = {}
    first = Engines(stored)
    assert first.answer(PROMPT) == expected(PROMPT)
    assert moved(first.prefill, Direction.SAVE) == [(0, 40)]
    assert moved(first.decode, Direction.SAVE) == [(40, 16)], "the increment, in whole blocks"
    later = Engines(stored)  # they have no pages, only the store
    history = [*PROMPT, *expected(PROMPT), *[9] * 7]
    assert later.answer(history) == expected(history)
    assert moved(later.prefill, Direction.LOAD) == [(0, 56)]
    assert moved(later.decode, Direction.LOAD) == []
    (outcome,) = later.decode.outcomes.values()
    assert (outcome.num_cached, outcome.num_loaded) == (56, 56), "the client hears of it"


def test_a_decode_engine_without_offload_saves_nothing() -> None:
    engines = Engines({}, write_policy="never")
    assert engines.answer(PROMPT) == expected(PROMPT)
    assert moved(engines.decode, Direction.SAVE) == []


def test_a_prompt_that_decode_must_compute_is_looked_up_and_saved_whole() -> None:
    stored: dict[Key, np.ndarray] = {}
    engines = Engines(stored)
    assert engines.answer(PROMPT, is_reached=False) == expected(PROMPT)
    assert [each.why for each in engines.decode.recorder.of(HandedOver)] != [""]
    assert moved(engines.decode, Direction.SAVE) == [(0, 56)]
    later = Engines(stored)
    assert later.answer(PROMPT, is_reached=False) == expected(PROMPT)
    assert moved(later.decode, Direction.LOAD) == [(0, 40)]
    assert sum(each.num_new_tokens for each in later.decode.recorder.steps) == 1, (
        "the prompt's last token"
    )


def test_a_decode_engine_saves_although_loads_are_elsewhere() -> None:
    engines = Engines({})
    assert engines.decode.mover is not None
    engines.decode.mover.seconds = 1000.0
    for number in range(3):
        prompt = [number, *PROMPT]
        assert engines.answer(prompt) == expected(prompt)
    assert len(moved(engines.decode, Direction.SAVE)) == 3


def test_handovers_do_not_hold_up_saves() -> None:
    """More prompts wait for decode engines than there may be saves at a time."""
    num_handing = MAX_SAVES + 1
    engines = Engines({})
    engines.network.supply = lambda *_: None  # type: ignore[method-assign]
    for number in range(num_handing):
        bootstrap = Bootstrap(number, "prefill", 1)
        for side in (engines.prefill, engines.decode):
            side.submit(f"r{number}", [number, *PROMPT], bootstrap=bootstrap)
    for _ in range(100):
        engines.network.tick(0.05)
        for side in (engines.prefill, engines.decode):
            side.turn()
    assert len(engines.prefill.scheduler.state.handing) == num_handing
    assert len(moved(engines.prefill, Direction.SAVE)) == num_handing
