"""Where the models of these tests run. And the levels of the kernels: each one that tests use is
compiled before the first test."""

from __future__ import annotations

import fcntl
from contextlib import suppress

import pytest
import torch

from setpoint.engine.kernels.cpu import build, library
from setpoint_testing.cpu_levels import LEVELS, QUICK


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: this torch sees no CUDA device")
    return name


@pytest.fixture(autouse=True)
def _quick_tests_use_quick_levels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("full"):
        return
    open_library = library._open

    def open_quick(level: str) -> library.Kernels:
        assert level in QUICK, f"a test that uses the level {level} needs the mark full"
        return open_library(level)

    monkeypatch.setattr(library, "_open", open_quick)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Minutes on a slow machine, while a test has a time limit. Workers wait for one another."""
    if session.config.option.collectonly:
        return
    at_levels = [
        item for item in session.items if {"level", "levels"} & {*getattr(item, "fixturenames", ())}
    ]
    if not at_levels:
        return
    full = any(item.get_closest_marker("full") for item in at_levels)
    with suppress(build.BuildError):  # the tests will say so
        build.cache_dir().mkdir(parents=True, exist_ok=True)
        with (build.cache_dir() / "tests.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for level in LEVELS if full else QUICK:
                build.ensure_built(level)
