"""Ends this process at a given time, whatever its threads are doing: a parser that loops, a write
that nobody reads, an executor that the interpreter waits for at its exit.

Only C code that never gives the interpreter's lock back is stronger; service managers have SIGKILL
for that.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

logger = logging.getLogger(__name__)

RANK_LOST = 75
"""Exit code of an engine that has lost another rank of its model, whose process was killed or whose
link is lost: no request is to blame (EX_TEMPFAIL of sysexits.h)."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
END_S = 2.0
"""How long the end of a process may take once its work is done or its time is up."""
LAST_WORDS_S = 0.3
_POLL_S = 0.02


def leave(exit_code: int) -> NoReturn:
    """End this process without the interpreter's finalization, which ends the other threads where
    they are, and waits for some: one in a library's native code, for example in llguidance, crashes
    by that, and torch's may wait for the other ranks of a model."""
    logging.shutdown()
    os._exit(exit_code)


class Limit:
    """A limit in wall time, because that is what a waiting user measures. There is no limit until
    ``within`` is called; of several limits, the earliest counts."""

    def __init__(self) -> None:
        self._at = math.inf
        self._thread: threading.Thread | None = None
        self._words: threading.Thread
        """Says what hangs; stderr may be a pipe that nobody reads. It waits for ``_is_over`` from
        its start, because an interpreter that is ending starts no threads (Python 3.12)."""
        self._is_over = threading.Event()
        self.exit_code = 1
        """The exit code of a process that is ended by this limit."""
        self.is_quiet = False
        """Whether the process ends without logging what kept it from ending."""

    def within(self, seconds: float) -> None:
        """End this process after this many seconds if it still runs then. Call this from one thread
        only; a signal handler may call it."""
        self._at = min(self._at, time.monotonic() + seconds)
        if self._thread is None:
            self._words = threading.Thread(target=self._say_what_hangs, daemon=True)
            self._thread = threading.Thread(target=self._run, name="limit", daemon=True)
            self._words.start()
            self._thread.start()

    def _run(self) -> None:
        while time.monotonic() < self._at:
            time.sleep(_POLL_S)
        with suppress(Exception):
            _kill_descendants()
        if not self.is_quiet:
            self._is_over.set()
            self._words.join(LAST_WORDS_S)
        os._exit(self.exit_code)

    def _say_what_hangs(self) -> None:
        self._is_over.wait()
        logger.warning(
            "The process did not end in time and is killed. The stacks of its threads follow:"
        )
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


LIMIT = Limit()
"""The limit of this process."""


def end_at_signals(exit_code: int) -> None:
    """Make the first of SIGNALS end this process with this code, in order and within END_S, as long
    as no other handler replaces this one."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for each in SIGNALS:  # another one would kill the interpreter while it exits
            signal.signal(each, signal.SIG_IGN)
        LIMIT.exit_code, LIMIT.is_quiet = exit_code, True
        LIMIT.within(END_S)  # a destructor that runs now swallows the exception
        # No KeyboardInterrupt: one that passes through exec(), as in the import of a dataclass, has
        # the interpreter end itself by SIGINT, whoever catches it.
        raise SystemExit(exit_code)

    for each in SIGNALS:
        signal.signal(each, end)


def _kill_descendants() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
