"""Handles the signals that end a program. The main thread only handles signals, and the program's
event loop runs in another thread, so neither a busy loop nor a stuck thread delays the end
(decision 0050).
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from types import FrameType
from typing import Any, Generic, TypeVar

from setpoint.launch.deadline import END_S, LIMIT, SIGNALS

T = TypeVar("T")

INTERRUPTED = 130
"""The exit code of a program that is ended by its user, as shells have it."""
NOTICE_S = 0.25
"""Longest time until a signal is noticed."""
CLOSE_S = 1.0
"""How long the event loop may take to close: it waits for the threads of its executor."""


class EndAsked:
    """The requests to end that signals have made so far."""

    def __init__(self) -> None:
        """Must be created on the event loop that waits for it."""
        self.end = asyncio.Event()
        """The first signal: end in order."""
        self.at_once = asyncio.Event()
        """The second one: finish nothing."""

    def count(self, num_signals: int) -> None:
        """Note the number of signals so far."""
        if num_signals > 0:
            self.end.set()
        if num_signals > 1:
            self.at_once.set()


def run_until_asked(
    main: Callable[[EndAsked], Coroutine[Any, Any, T]],
    *,
    limit_s: Callable[[], float],
    at_once_s: float = END_S,
) -> T:
    """Run a coroutine on an event loop in a separate thread; returns its result or raises its
    exception. Must be called in the main thread.

    limit_s: the seconds from the first signal after which this process is ended, if it still runs.
    at_once_s: the same for the second signal.
    """
    run = _Run(main, limit_s, at_once_s)
    before = {number: signal.signal(number, run.take) for number in SIGNALS}
    try:
        return run.result()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Run(Generic[T]):
    def __init__(
        self,
        main: Callable[[EndAsked], Coroutine[Any, Any, T]],
        limit_s: Callable[[], float],
        at_once_s: float,
    ) -> None:
        self._main = main
        self._limit_s = limit_s
        self._at_once_s = at_once_s
        self._num_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._result: Future[T] = Future()
        self._thread = threading.Thread(target=self._work, name="event-loop", daemon=True)

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, in the main thread."""
        self._num_signals += 1
        if self._num_signals == 1:
            LIMIT.within(self._limit_s())
        else:  # a user who asks twice does not want to know what is still running
            LIMIT.exit_code, LIMIT.is_quiet = INTERRUPTED, True
            LIMIT.within(self._at_once_s)
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed: the program is ending already
                self._loop.call_soon_threadsafe(self._asked.count, self._num_signals)

    def result(self) -> T:
        self._thread.start()
        try:
            # Not one wait without a limit: a signal that comes between the handler of another and
            # the wait does not interrupt the wait, and its handler would run when the wait ends.
            while not wait([self._result], timeout=NOTICE_S).done:
                pass
            return self._result.result()
        finally:
            self._thread.join(CLOSE_S)

    def _work(self) -> None:
        import uvloop

        try:
            uvloop.run(self._serve())
        except BaseException as error:
            if not self._result.done():
                self._result.set_exception(error)

    async def _serve(self) -> None:
        self._asked = EndAsked()
        self._loop = asyncio.get_running_loop()
        self._asked.count(self._num_signals)
        self._result.set_result(await self._main(self._asked))
