"""Forced tokens change how many steps an output takes, and nothing else: random grammars, with and
without looking ahead, over random traces of retraction, chunks, limits and stops.

The scripted executor answers from its page store, so a forced token at a wrong place gives wrong
tokens.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from setpoint.core.errors import RequestError
from setpoint.core.grammar import NotReady
from setpoint.core.pagerows import PageRow, WindowColumns
from setpoint.core.records import GrammarLate, TokensForced
from setpoint.core.request import Ids, LogprobOptions, Request
from setpoint.recording.format import OFF, ON
from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.preparers import ScriptedPreparer
from setpoint_testing.recordings import record, replayed

EOS = frozenset({0, 1})


class Maze:
    """Allows a few tokens at each place, often only one; which ones follows from a seed and the
    tokens before. Some ways end, some end in nothing, some raise."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._place = random.Random(seed).randrange(1 << 20)
        self._length = 0
        self._allowed = self._choose()
        self.terminated = False

    def _choose(self) -> list[int]:
        rng = random.Random(self._place)
        if self._length > 2 and rng.random() < 0.04:
            return rng.choice([[], [0], [0, 1], [rng.randrange(VOCAB), 0], [-1]])
        count = 1 if rng.random() < 0.7 else rng.randrange(2, 6)
        return [rng.randrange(2, VOCAB) for _ in range(count)]

    def accept(self, token: int) -> None:
        assert self.terminated is False
        if token not in self._allowed:
            raise RequestError(f"token {token} is not allowed")
        self._place = random.Random(self._place * VOCAB + token).randrange(1 << 40)
        self._length += 1
        rng = random.Random(self._place + 1)
        if rng.random() < 0.005:
            raise RequestError("it is lost")
        self.terminated = token in EOS or rng.random() < 0.02
        self._allowed = self._choose()

    def fill_mask(self, words: Ids) -> None:
        if self._allowed == [-1]:
            raise ValueError("a bug")
        for token in self._allowed:
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


def random_requests(rng: random.Random, per_row: int) -> list[dict[str, Any]]:
    found = []
    for number in range(rng.randrange(3, 9)):
        most = rng.choice([1, 2, 3, 8, 20, 40])
        found.append(
            {
                "rid": f"{rng.choice('ggf')}{number}",
                "prompt": [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 14))],
                "max_new_tokens": most,
                "min_new_tokens": min(rng.choice([0, 0, 0, 5]), most),
                "stop_token_ids": tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1, 4]))),
                "ignore_eos": rng.random() < 0.2,
                "stream": rng.random() < 0.5,
                "logprobs": LogprobOptions() if rng.random() < 0.15 else None,
                "hidden_states": per_row == 1 and rng.random() < 0.15,
            }
        )
    return found


def random_config(rng: random.Random) -> dict[str, Any]:
    page_size = rng.choice([1, 2, 4])
    row = rng.choice([None, None, PageRow(1, (WindowColumns(5, 1, 2),), read_step=1)])
    return {
        "num_pages": rng.choice([64, 80, 200]) * (1 if row is None else 2),
        "page_size": page_size,
        "row": row,
        "depth": rng.choice([0, 1, 2]),
        "replan_inflight": rng.random() < 0.7,
        "max_tokens_per_row": rng.choice([1, 1, 4]),
        "chunked_prefill_size": rng.choice([None, 2 * page_size, 16]),
        "mixed_chunk": rng.random() < 0.4,
        "test_retract_interval": rng.choice([0, 0, 2, 5]),
        "stream_interval": rng.choice([1, 3]),
        "conservativeness": rng.choice([1.0, 0.05]),
        "max_running_requests": rng.choice([2, 8]),
    }


class LateMaze(Maze):
    """A maze that is often late: after a token, or only when its mask is wanted."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._moods = random.Random(seed + 1)
        self._knows_end = self._knows_mask = False

    def accept(self, token: int) -> None:
        super().accept(token)
        self._knows_end = self._moods.random() > 0.15
        self._knows_mask = self._moods.random() > 0.15

    def fill_mask(self, words: Ids) -> None:
        if not (self._knows_end and self._knows_mask):
            raise NotReady
        super().fill_mask(words)

    @property
    def terminated(self) -> bool:
        if not self._knows_end:
            raise NotReady
        return self._terminated

    @terminated.setter
    def terminated(self, is_over: bool) -> None:
        self._terminated = is_over

    def make_ready(self) -> None:
        self._knows_end = self._knows_mask = True


def run(
    config: dict[str, Any],
    requests: list[dict[str, Any]],
    seed: int,
    *,
    jumps: bool,
    maze: type[Maze] = Maze,
) -> Harness:
    def make(request: Request) -> Maze:
        return maze(1_000 * seed + request.seed)

    how_many = random.Random(seed)
    harness = Harness(
        **config,
        preparer=ScriptedPreparer(
            make, needs=lambda request: request.rid.startswith("g"), jumps=jumps
        ),
        eos_token_ids=EOS,
        num_tokens=lambda most: how_many.randint(1, most),
    )
    for request in requests:
        harness.submit(**request)
        harness.turn(how_many.choice([0, 1, 4]))
    harness.drain()
    return harness


def told(harness: Harness) -> dict[str, Any]:
    """What clients get, apart from when."""
    return {
        rid: (outcome.ids, outcome.finish, outcome.logprob_ids, outcome.hidden_states)
        for rid, outcome in harness.outcomes.items()
    }


def check(seeds: range) -> None:
    steps = {True: 0, False: 0}
    forced = retractions = replays = 0
    for seed in seeds:
        rng = random.Random(seed)
        config = random_config(rng)
        requests = random_requests(rng, config["max_tokens_per_row"])
        with_, without = (run(config, requests, seed, jumps=jumps) for jumps in (True, False))
        assert told(with_) == told(without), (seed, config)
        assert not without.recorder.of(TokensForced)
        for jumps, harness in ((True, with_), (False, without)):
            steps[jumps] += len(harness.plans)
            retractions += len(harness.recorder.retractions)
        forced += sum(step.num_forced for step in with_.recorder.steps)
        if seed % 20 == 0:
            replays += 1
            with tempfile.TemporaryDirectory() as folder:
                for content in (OFF, ON):
                    outcome = replayed(record(with_, Path(folder) / content, content=content))
                    assert (outcome.difference, outcome.num_steps) == ("", len(with_.plans)), seed
    # The traces must exercise what they claim to.
    assert forced > 100
    assert steps[True] < steps[False]
    assert retractions > 5
    assert replays


def test_forced_tokens_change_no_output() -> None:
    check(range(24))


def check_late(seeds: range) -> None:
    late = discarded = replays = 0
    for seed in seeds:
        rng = random.Random(seed)
        config = random_config(rng)
        requests = random_requests(rng, config["max_tokens_per_row"])
        jumps = seed % 2 == 0
        usual = run(config, requests, seed, jumps=jumps)
        harness = run(config, requests, seed, jumps=jumps, maze=LateMaze)
        assert told(harness) == told(usual), (seed, config)
        assert harness.cache.pool_stats().held == 0
        assert harness.cache.locked_tokens == 0
        found = harness.recorder.of(GrammarLate)
        late += len(found)
        discarded += sum(each.discards for each in found)
        if seed % 4 == 0:
            replays += 1
            with tempfile.TemporaryDirectory() as folder:
                for content in (OFF, ON):
                    outcome = replayed(record(harness, Path(folder) / content, content=content))
                    assert (outcome.difference, outcome.damage) == ("", ""), seed
                    assert outcome.num_steps == len(harness.plans), seed
    # The traces must exercise what they claim to.
    assert late > 100
    assert discarded > 10
    assert replays


def test_late_grammars_change_no_output() -> None:
    """A sequence that leaves the batch until its grammar is ready, and comes back, gets the tokens
    that it would have got, and its recording replays."""
    check_late(range(40))


@pytest.mark.full
def test_late_grammars_change_no_output_of_many() -> None:
    check_late(range(40, 400))


@pytest.mark.full
def test_forced_tokens_change_no_output_of_many() -> None:
    check(range(24, 600))
