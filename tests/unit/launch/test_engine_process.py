"""The preparation that an engine leaves for the time when it has nothing else to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from setpoint.launch import engine_process
from setpoint.launch.engine_process import IDLE_LOOKS, once_idle


@pytest.mark.parametrize("runs", [[], [0], [IDLE_LOOKS - 1], [IDLE_LOOKS - 1, 0, 2, 1]])
def test_the_work_waits_until_the_engine_was_idle_for_a_while(
    monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    """runs: how often the engine is found idle before it is found busy again."""
    monkeypatch.setattr(engine_process, "LOOK_EVERY_S", 0.0)
    looks: list[bool] = []
    done: list[int] = []

    def found() -> Iterator[bool]:
        for idle in runs:
            yield from [True] * idle
            yield False
        while True:
            yield True

    states = found()

    def is_idle() -> bool:
        looks.append(next(states))
        return looks[-1]

    once_idle(is_idle, lambda: done.append(len(looks))).join()
    assert done == [sum(runs) + len(runs) + IDLE_LOOKS]
    assert looks[-IDLE_LOOKS:] == [True] * IDLE_LOOKS
