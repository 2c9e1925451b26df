"""Where the models of these tests run; ``tests/gpu`` takes the same tests elsewhere. And the kernels
of all levels, compiled before the first test."""

from __future__ import annotations

import fcntl
from contextlib import suppress

import pytest

from setpoint.engine.kernels.cpu import build


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Minutes on a slow machine, while a test has a time limit. Workers wait for one another."""
    if session.config.option.collectonly:
        return
    if not any(hasattr(getattr(item, "module", None), "LEVELS") for item in session.items):
        return
    with suppress(build.BuildError):  # the tests will say so
        build.cache_dir().mkdir(parents=True, exist_ok=True)
        with (build.cache_dir() / "tests.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for level in build.supported_levels():
                build.ensure_built(level)
