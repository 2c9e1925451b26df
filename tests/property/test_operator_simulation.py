"""Orders of every kind under kills, in simulated servers: afterwards every engine that serves is as the
last order says (``setpoint_testing.simulation.operator_run``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from setpoint.ipc.client import EngineClient
from setpoint.ipc.line import EngineLine
from setpoint.ipc.orders import Orders
from setpoint.ipc.submission import Submission
from setpoint_testing.simulation.operator_run import simulate_operators

BLOCK = 40
"""Seeds in one test."""
HAPPENS = (
    *("killed", "stopped", "refusing", "start crashes", "start hangs", "start refuses"),
    *("pause abort", "pause retract", "pause in_place", "resumes", "updates", "changes"),
    *("updates that abort", "releases", "restores", "attaches", "detaches", "profiles"),
    *("scale_down", "flushes", "refused operators", "refused for requests"),
)
FOUND = {
    229: "A request that a pause had ended went on, because its engine was killed before it knew.",
    100: "An update that failed left all engines paused.",
    233: "A release was in force and called refused, because all engines died at its end.",
}
"""Seeds that have found a fault, with the fault."""


def check(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        report = simulate_operators(seed)
        again = f"python -m setpoint_testing.simulation --operators --seed {seed} -v"
        assert not report.wrong, (again, report.wrong)
        seen.update(report.seen)
    return seen


@pytest.mark.cases(1)
@pytest.mark.parametrize("block", range(2))
def test_every_engine_is_as_the_last_order_says(block: int) -> None:
    seen = check(range(block * BLOCK, (block + 1) * BLOCK))
    assert len([what for what in HAPPENS if seen[what]]) > len(HAPPENS) // 2


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_many_more_seeds() -> None:
    seen = check(range(100, 6100))
    assert all(seen[what] for what in HAPPENS), [what for what in HAPPENS if not seen[what]]


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_once(seed: int) -> None:
    check(range(seed, seed + 1))


# ------------------------------------------------------------------ what it must find


def as_if_told(self: Orders, line: EngineLine) -> None:
    """An engine that missed orders serves as it is."""


def nothing(self: EngineClient, *_: object, **__: object) -> None: ...


def goes_on_although_aborted(self: Submission) -> None:
    self.aborted = None
    GO_ON(self)


def has_started_with_nothing(self: Orders, line: EngineLine) -> None:
    """The pauses of the rank count as told."""
    ATTACHED(self, line)
    self._told[line].paused = self.paused.get(line.rank)


@asynccontextmanager
async def as_it_is(self: Orders, *, flushes: bool) -> AsyncIterator[None]:
    """No engine is asked before an order begins."""
    yield


GO_ON, ATTACHED = Submission.go_on, Orders.attached


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Orders, "tell", as_if_told),
        (Orders, "_take_back", nothing),
        (Submission, "go_on", goes_on_although_aborted),
        (Orders, "attached", has_started_with_nothing),
        (Orders, "at_rest", as_it_is),
    ],
)
def test_a_fault_is_found(
    owner: type, name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    assert any(simulate_operators(seed).wrong for seed in (132, 229, *range(60)))
