"""What holds for every test."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest


def pytest_sessionstart() -> None:
    """A shell starts background jobs with Ctrl-C ignored, and so would be every process that a test starts and interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was() -> Iterator[None]:
    """A command called in this process sets logging up for the process; the next test must not find its handlers."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    root.setLevel(level)
