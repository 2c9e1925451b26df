"""What holds for every test."""

from __future__ import annotations

import functools
import gc
import json
import logging
import math
import os
import signal
import ssl
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from setpoint.launch.parent.process import OPENMP_SPINS

hypothesis.settings.register_profile("setpoint", deadline=None)
hypothesis.settings.load_profile("setpoint")
"""No test asserts a machine's speed."""
os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)
"""The value is that of an engine's process. Several test processes share the cores: with OpenMP's
own number, most of the tests' time with torch was spent in threads that spin while others need
their core."""
os.environ.setdefault("TRITON_INTERPRET", "1")
"""Where Triton is first imported, it decides whether its functions are interpreted. Tests that compile
kernels start processes of their own (``setpoint_testing.absent_gpu``)."""
ssl.create_default_context = functools.cache(ssl.create_default_context)
"""Every client of HTTP makes a context although none of these tests speaks TLS. One takes 23 ms to read
the certificates, ten times as long as the request that follows."""
LOGGERS = ("", "uvicorn", "uvicorn.access", "uvicorn.asgi", "uvicorn.error")


def pytest_sessionstart() -> None:
    """A shell starts background jobs with Ctrl-C ignored, and so would be every process that a test
    starts and interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The tests and what they import stay to the end. The garbage collector would scan them again and
    again, at a third of what a collection of tests costs, so it is off meanwhile and never scans them
    later. Nor is the garbage among them collected first: that takes two seconds of each worker."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_unconfigure() -> None:
    """Frozen objects are not collected at the end of the process either, and Triton would report its
    own as leaked, in a hundred lines."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick suite has n cases of a test with the mark ``cases(n)``, spread evenly. The longest files
    come first, so that no worker has one left when the others have ended. A file without a known
    duration may be long."""
    groups = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("cases")) and not item.get_closest_marker("full"):
            groups[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (_, wanted), cases in groups.items():
        kept = {number * len(cases) // wanted for number in range(wanted)}
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(pytest.mark.full)
    seconds = json.loads(Path(__file__).with_name("durations.json").read_text())
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], math.inf))


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was() -> Iterator[None]:
    """A command or a server run in this process sets logging up for the process; the next test must
    not find what it left."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(set(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        for handler in set(logger.handlers) - handlers:
            logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
