"""Where the models of these tests run; ``tests/gpu`` takes the same tests elsewhere."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu"
