"""The lpm policy: cached prefixes first, and of requests that begin alike one before the rest."""

from __future__ import annotations

import itertools
import random

import numpy as np

from setpoint.scheduler.policy import Candidate, QueueView, lpm


def candidate(seq_id: int, ids: list[int], *, matched: int = 0, namespace: str = "") -> Candidate:
    return Candidate(seq_id, np.array(ids, np.int32), namespace, matched)


def order(candidates: list[Candidate], *, check: int = 32, deprioritize: int = 3) -> list[int]:
    return lpm(QueueView(candidates, check, deprioritize))


def test_longest_match_first_and_arrival_breaks_ties() -> None:
    queue = [
        candidate(1, [1], matched=0),
        candidate(2, [2], matched=40),
        candidate(3, [3], matched=50),
        candidate(4, [4], matched=40),
    ]
    assert order(queue) == [3, 2, 4, 1]


def test_of_requests_that_begin_alike_the_first_goes_and_the_rest_wait() -> None:
    queue = [
        candidate(1, [7, 8, 9, 1]),
        candidate(2, [7, 8, 9, 2]),
        candidate(3, [7, 8, 1, 1]),
        candidate(4, [5, 5, 5, 5]),
    ]
    assert order(queue) == [1, 3, 4, 2]
    assert order(queue, deprioritize=2) == [1, 4, 2, 3]
    assert order(queue, deprioritize=4) == [1, 2, 3, 4]


def test_namespaces_short_prompts_and_cached_ones_are_not_compared() -> None:
    queue = [
        candidate(1, [7, 8, 9]),
        candidate(2, [7, 8, 9], namespace="a"),
        candidate(3, [7, 8]),
        candidate(4, [7, 8, 9], matched=33),
    ]
    assert order(queue) == [4, 1, 2, 3]
    assert order([candidate(1, [7, 8, 9]), candidate(2, [7, 8, 9])], check=-1) == [1, 2]


def test_agrees_with_comparing_every_pair() -> None:
    rng = random.Random(0)
    for _ in range(300):
        prompts = [[rng.randrange(2) for _ in range(rng.randint(1, 8))] for _ in range(12)]
        least = rng.randint(1, 6)
        late = {
            j for i, j in itertools.combinations(range(12), 2) if min(map(len, (prompts[i], prompts[j]))) >= least
            and prompts[i][:least] == prompts[j][:least]
        }  # fmt: skip
        expected = sorted(range(12), key=lambda number: number in late)
        assert (
            order(
                [candidate(number, ids) for number, ids in enumerate(prompts)], deprioritize=least
            )
            == expected
        )
