"""Clients' latencies in an engine's moments: a time without steps has none, and none is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from setpoint.core.control import Moments
from setpoint.core.moments import Moment
from setpoint.frontend.telemetry.latencies import Latencies
from setpoint.frontend.telemetry.watching import Watch
from setpoint.ipc.engine_life import EngineLife
from setpoint_testing.fake_engine import SOME_FACTS


class Line:
    """An engine that has finished these moments."""

    rank = 0

    @property
    def life(self) -> EngineLife:
        life = EngineLife()
        life.ready(SOME_FACTS)
        return life

    def __init__(self, *parts: list[Moment]) -> None:
        self._parts = list(parts)

    async def get_moments(self, since: int, *, timeout_s: float) -> Moments:
        return Moments(since, self._parts.pop(0) if self._parts else [])


def moment(epoch: float, begin: float, end: float, *, steps: int) -> Moment:
    return Moment(at=epoch + begin, seconds=end - begin, num_decode=steps)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("ends", [100.0, 100.2, 100.5, 100.7, 100.99])
@pytest.mark.parametrize("rests", [300.05, 1.0])
def test_a_time_without_steps_has_no_latencies(ends: float, rests: float, apart: bool) -> None:
    """A request's first token comes just before the rest, and another one's just after it."""
    seen = Latencies()
    again = ends + rests
    seen.first(0.5, ends - 0.001)
    seen.first(2.0, again + 0.001)
    seen.between(0.1, 3, again + 0.9)
    before = moment(seen._epoch, ends - 1.3, ends, steps=3)
    rest = moment(seen._epoch, ends, again, steps=0)
    after = moment(seen._epoch, again, again + 2.0, steps=9)
    parts = [[before, rest], [after]] if apart else [[before, rest, after]]
    watch = Watch(cast(Any, SimpleNamespace(lines=[Line(*parts)])), seen)

    async def main() -> None:
        for _ in parts:
            await watch.look()

    asyncio.run(main())
    assert rest.quantiles == {}
    assert before.quantiles["ttft_p95"] == pytest.approx(0.5, rel=0.05)
    assert after.quantiles["ttft_p50"] == pytest.approx(2.0, rel=0.05)
    assert after.quantiles["itl_p50"] == pytest.approx(0.1, rel=0.05)
    assert list(watch.lanes[None].moments) == [before, rest, after]
