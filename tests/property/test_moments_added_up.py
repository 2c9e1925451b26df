"""What several engines did together is what each of them did: no count is lost, and none counts
twice."""

from __future__ import annotations

import random

import pytest

from setpoint.core.moments import Moment, add_up


def random_moments(rng: random.Random) -> list[Moment]:
    """The moments of an engine, some of them long, with gaps where it was away."""
    at, found = 1000.0 + rng.random(), []
    for _ in range(rng.randrange(12)):
        seconds = rng.choice([1.0, 1.0 + rng.random(), rng.uniform(2, 6)])
        found.append(
            Moment(
                at=at,
                seconds=seconds,
                num_decode=rng.randrange(5),
                running=float(rng.randrange(4)),
                queue_max=float(rng.randrange(4)),
                new_tokens=rng.randrange(100),
                output_tokens=rng.choice([None, rng.randrange(100)]),
                retracted=rng.randrange(3),
                refusals={rng.choice("ab"): rng.randrange(3)},
                usage=rng.random(),
                busy_s=rng.random() * seconds,
                pool={"total": 10},
            )
        )
        at += seconds + rng.choice([0.0, 0.0, rng.uniform(0, 5)])
    return found


@pytest.mark.parametrize("seed", range(200))
def test_nothing_is_lost_and_nothing_counts_twice(seed: int) -> None:
    rng = random.Random(seed)
    engines = [random_moments(rng) for _ in range(rng.randrange(1, 4))]
    each = [moment for moments in engines for moment in moments]
    totals = [total for second in range(999, 1200) if (total := add_up(engines, second))]
    for name in ("num_decode", "new_tokens", "retracted"):
        assert sum(getattr(one, name) for one in totals) == sum(getattr(one, name) for one in each)
    assert sum(one.output_tokens or 0 for one in totals) == sum(
        one.output_tokens or 0 for one in each
    )
    for reason in "ab":
        assert sum(one.refusals.get(reason, 0) for one in totals) == sum(
            one.refusals.get(reason, 0) for one in each
        )
    for total in totals:
        present = [
            moments
            for moments in engines
            if any(one.at < total.at + 1 and one.at + one.seconds > total.at for one in moments)
        ]
        assert total.seconds == 1.0
        assert len(present) >= 1
        assert 0 <= total.running <= 3 * len(present)
        assert 0 <= total.usage <= 1
        assert total.pool["total"] <= 10 * len(present)


def test_a_long_moment_keeps_its_state() -> None:
    busy = [Moment(at=10.2, seconds=3.5, running=2.0, gen_throughput=8.0, output_tokens=28)]
    other = [Moment(at=10.9 + each, seconds=1.0, running=1.0, output_tokens=5) for each in range(4)]
    found = [add_up([busy, other], second) for second in range(10, 15)]
    assert [one and one.running for one in found] == [3.0, 3.0, 3.0, 3.0, 1.0]
    assert [one and one.output_tokens for one in found] == [33, 5, 5, 5, None]
    assert add_up([busy, other], 9) is None
    assert add_up([], 10) is None
