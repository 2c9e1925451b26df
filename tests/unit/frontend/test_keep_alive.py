"""Durations as Ollama's clients send them."""

from __future__ import annotations

import math

import pytest

from setpoint.core.errors import RequestError
from setpoint.frontend.apis.ollama.keep_alive import keep_seconds


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, math.inf),
        (0, 0),
        (2.5, 2.5),
        (-1, math.inf),
        ("0", 0),
        ("0s", 0),
        ("300", 300),
        ("-1", math.inf),
        ("-1m", math.inf),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        (".5s", 0.5),
        ("250ms", 0.25),
        ("+3s", 3),
    ],
)
def test_durations(value: float | str | None, seconds: float) -> None:
    assert keep_seconds(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "soon", "5 m", "m", "5x", "1h-3m", "9" * 400, "1s" * 100])
def test_other_texts_are_refused(value: str) -> None:
    with pytest.raises(RequestError, match="keep_alive must be"):
        keep_seconds(value)
