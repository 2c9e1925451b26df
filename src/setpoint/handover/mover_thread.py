"""The thread in which an engine's transfers run, beside its loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setpoint.handover.frames import HandoverError

logger = logging.getLogger(__name__)

NAME_THREADS = 32
"""Most names of hosts that are looked up at a time; addresses need no thread."""


class MoverThread:
    """An event loop in a thread that ends with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(NAME_THREADS, "handover-names"))
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="handover", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function in the thread, soon; calls keep their order."""
        self.loop.call_soon_threadsafe(function, *args)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task; only in the thread. What it raises is logged, unless it is a HandoverError:
        whoever waits for the transfer hears of that."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, HandoverError):
            logger.error("A transfer connection failed.", exc_info=error)

    def stop(self) -> None:
        """End every task, and then the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10.0)
