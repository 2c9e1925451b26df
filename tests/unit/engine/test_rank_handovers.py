"""Handovers of engines with several ranks: the scheduler hears of the slowest rank, once, and one that
fails ends the others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from setpoint.core.bootstrap import Bootstrap
from setpoint.core.handover import HandoverState, PromptReceived, PromptSent, PromptWanted
from setpoint.core.logprobs import LogprobBlock
from setpoint.engine.executor.rank_handovers import LOST, RankedGiver, RankedTaker, RankSide
from setpoint.engine.executor.rank_messages import GiverNews, TakerNews
from setpoint.engine.executor.tensor_parallel import decode_to_rank, encode

ROWS = np.array([3, 1, 2], np.int32)
HANDED = HandoverState(
    3, seed=5, ids=[7], logprobs=LogprobBlock([0.0], [7], [], [], []), num_cached=2
)
BARE = HandoverState(3, seed=5, ids=[7], num_cached=2)


class Calls:
    """A giver or a taker that notes what it is asked for."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*values: Any) -> None:
            plain = [each.tolist() if isinstance(each, np.ndarray) else each for each in values]
            self.found.append((name, *plain))

        return call


class Engine:
    """Rank 0's links to one other rank, whose messages go through their encoding."""

    group = SimpleNamespace(size=2)

    def __init__(self) -> None:
        self.own, self.other, self.posted = Calls(), Calls(), list[Any]()
        self._side = RankSide(self.other, self.other)  # type: ignore[arg-type]
        self.heard: dict[type, Callable[[Any], object]] = {}

    def send(self, message: Any) -> None:
        self._side.do(decode_to_rank(encode(message)))

    def listen(self, kind: type, heard: Callable[[Any], object]) -> None:
        self.heard[kind] = heard

    def says(self, message: PromptWanted | PromptSent | PromptReceived) -> None:
        """The other rank says something."""
        kind = TakerNews if isinstance(message, PromptReceived) else GiverNews
        self.heard[kind](kind(message))


@pytest.fixture
def engine() -> Engine:
    return Engine()


def giver_of(engine: Engine) -> RankedGiver:
    giver = RankedGiver(engine, engine.posted.append)  # type: ignore[arg-type]
    giver.lead(engine.own)  # type: ignore[arg-type]
    return giver


def taker_of(engine: Engine) -> RankedTaker:
    taker = RankedTaker(engine, engine.posted.append)  # type: ignore[arg-type]
    taker.lead(engine.own)  # type: ignore[arg-type]
    return taker


def test_a_room_is_given_when_all_ranks_have_given_it(engine: Engine) -> None:
    giver = giver_of(engine)
    giver.offer(1, 9, b"digest")
    engine.says(PromptWanted(1, 4))
    assert engine.posted == []
    giver.note_own(PromptWanted(1, 4))
    assert engine.posted == [PromptWanted(1, 4)]
    giver.supply(1, ROWS, HANDED)
    giver.note_own(PromptSent(1, num_bytes=10, seconds=2.0))
    assert engine.posted == [PromptWanted(1, 4)]
    engine.says(PromptSent(1, num_bytes=11, seconds=1.0))
    assert engine.posted[1:] == [PromptSent(1, num_bytes=21, seconds=2.0)]
    assert engine.own.found == [("offer", 1, 9, b"digest"), ("supply", 1, [3, 1, 2], HANDED)]
    assert engine.other.found == [("offer", 1, 9, b"digest"), ("supply", 1, [3, 1, 2], BARE)]


@pytest.mark.parametrize("who", ["own", "other"])
def test_a_rank_that_fails_withdraws_the_room_from_all(engine: Engine, who: str) -> None:
    giver = giver_of(engine)
    giver.offer(1, 9, b"digest")
    first, second = (giver.note_own, engine.says) if who == "own" else (engine.says, giver.note_own)
    first(PromptWanted(1, 0))
    first(PromptSent(1, "it broke"))
    assert engine.posted == []
    assert engine.own.found[-1] == engine.other.found[-1] == ("withdraw", 1, LOST)
    second(PromptSent(1, LOST))
    assert engine.posted == [PromptSent(1, "it broke")]


def test_a_prompt_has_arrived_when_all_ranks_have_their_part(engine: Engine) -> None:
    taker, bootstrap = taker_of(engine), Bootstrap(9, "host", 8998)
    taker.fetch(1, bootstrap, b"digest", 2, ROWS)
    expected = ("fetch", 1, bootstrap, b"digest", 2, [3, 1, 2])
    assert engine.own.found == engine.other.found == [expected]
    taker.note_own(PromptReceived(1, HANDED, 3, num_bytes=10, seconds=1.0, waited_s=0.5))
    assert engine.posted == []
    engine.says(PromptReceived(1, BARE, 3, num_bytes=10, seconds=2.0, waited_s=0.1))
    assert engine.posted == [PromptReceived(1, HANDED, 3, num_bytes=20, seconds=2.0, waited_s=0.5)]


@pytest.mark.parametrize("who", ["own", "other"])
def test_a_rank_that_fails_cancels_the_fetch_of_all(engine: Engine, who: str) -> None:
    taker = taker_of(engine)
    taker.fetch(1, Bootstrap(9, "host", 8998), b"digest", 0, ROWS)
    first, second = (taker.note_own, engine.says) if who == "own" else (engine.says, taker.note_own)
    first(PromptReceived(1, None, 1, "it broke"))
    assert engine.posted == []
    assert engine.own.found[-1] == engine.other.found[-1] == ("cancel", 1)
    second(PromptReceived(1, HANDED, 3))
    assert engine.posted == [PromptReceived(1, None, 1, "it broke")], (
        "of use is what all ranks have"
    )
