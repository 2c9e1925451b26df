"""The levels of the C++ kernels at which tests run. Compiling one takes a minute of a core: the
quick tests use three at most, and the others belong to ``make full``."""

from __future__ import annotations

import pytest

from setpoint.engine.kernels.cpu import build

LEVELS = build.supported_levels()
"""All of this machine, best first."""
QUICK = [each for each in LEVELS if each in (LEVELS[0], "scalar") or build.is_emulated(each)]
"""The best one, that of every machine, and tiles."""
OTHERS = [each for each in LEVELS if each not in QUICK]

each_level = pytest.mark.parametrize(
    "level", [*QUICK, *(pytest.param(each, marks=pytest.mark.full) for each in OTHERS)]
)
all_levels = pytest.mark.parametrize(
    "levels",
    [
        pytest.param(QUICK, id="quick levels"),
        pytest.param(OTHERS, id="other levels", marks=pytest.mark.full),
    ],
)
"""Gives a test all quick levels at once, or all others, to be compared with one result that takes
long to compute."""
