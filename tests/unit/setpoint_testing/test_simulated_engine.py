"""The simulated engine: the real scheduler under simulated clients, on a virtual clock."""

from __future__ import annotations

from itertools import pairwise

import pytest

from setpoint.core.records import Record, RequestDone, StepDone
from setpoint.core.settings import Settings
from setpoint_testing.simulated import CostModel, Engine, Simulation
from setpoint_testing.traffic import Arrivals, Load, Traffic, uniform

COSTS = CostModel(weights_s=0.02, token_s=0.0001, kv_token_s=0.0, host_s=0.0, host_row_s=0.0)


class Records:
    def __init__(self) -> None:
        self.all: list[Record] = []

    def on(self, record: Record) -> None:
        self.all.append(record)

    @property
    def steps(self) -> list[StepDone]:
        return [record for record in self.all if isinstance(record, StepDone)]

    @property
    def ends(self) -> list[RequestDone]:
        return [record for record in self.all if isinstance(record, RequestDone)]


def served(load: Load, arrivals: Arrivals, *, pool_tokens: int = 4096, seed: int = 1) -> Records:
    """The records of a server that serves these clients until they are done."""
    records = Records()
    settings = Settings(max_running_requests=8, chunked_prefill_size=64)
    engine = Engine(COSTS, pool_tokens, context_len=1024, settings=settings)
    traffic = Traffic(load, arrivals, seed)
    simulation = Simulation(engine, traffic, traffic.num_outputs, records)
    for _ in range(20_000):
        simulation.turn()
        if simulation.is_over:
            return records
    raise AssertionError("the clients are not done")


def test_every_request_of_a_benchmark_ends_with_the_outputs_that_were_drawn() -> None:
    load = Load(uniform(20, 150), uniform(5, 30), max_new_tokens=64)
    records = served(load, Arrivals(rate=1000, bursts=40, total=40))
    assert len(records.ends) == 40
    assert {done.finish.type for done in records.ends} == {"stop"}
    assert all(5 <= done.num_outputs <= 30 for done in records.ends)
    assert sum(step.num_sampled for step in records.steps) == sum(
        done.num_outputs for done in records.ends
    )


def test_a_step_takes_the_longer_of_reading_weights_and_computing_tokens() -> None:
    assert COSTS.seconds(10, 0, 10, eager=False) == pytest.approx(0.02)
    assert COSTS.seconds(1000, 0, 1, eager=False) == pytest.approx(0.1)
    load = Load(uniform(40, 40), uniform(10, 10), max_new_tokens=10)
    steps = served(load, Arrivals(rate=1, total=1)).steps
    ends = [step.finished_at for step in steps]
    assert len(steps) == 10  # one of the prompt, which brings the first token
    assert [after - before for before, after in pairwise(ends)] == (pytest.approx([0.02] * 9))


def test_conversations_find_their_history_in_the_prefix_cache() -> None:
    load = Load(uniform(30, 40), uniform(5, 10), max_new_tokens=16, turns=3)
    ends = served(load, Arrivals(users=1, think_s=1.0, total=1)).ends
    assert [done.num_cached > 0 for done in ends] == [False, True, True]
    assert ends[2].num_prompt > ends[1].num_prompt > ends[0].num_prompt


def test_clients_without_patience_give_up() -> None:
    load = Load(uniform(30, 40), uniform(300, 300), max_new_tokens=400, patience_s=1.0)
    ends = served(load, Arrivals(rate=1, total=2)).ends
    assert [done.finish.type for done in ends] == ["abort", "abort"]


def test_the_same_seed_gives_the_same_records() -> None:
    load = Load(uniform(20, 150), uniform(5, 60), max_new_tokens=64)
    arrivals = Arrivals(users=12, think_s=0.1, ramp_s=0.5, until_s=3.0)
    first, second, other = (served(load, arrivals, pool_tokens=700, seed=s) for s in (1, 1, 2))
    assert first.steps == second.steps != other.steps
