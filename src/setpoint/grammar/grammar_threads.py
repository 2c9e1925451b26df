"""Threads of the engine process that make grammars and do their slow work, so that the engine's
loop never waits for a grammar.

Implements ``core.preparation.Preparer`` over a ``GrammarFactory``. A thread cannot be stopped. If
no request waits for its grammar any more, it is abandoned and another thread replaces it, as long
as few are abandoned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from setpoint.core.errors import RequestError
from setpoint.core.failures import failure_finish, log_failure, refusal_finish
from setpoint.core.grammar import Grammar, GrammarFactory
from setpoint.core.messages import Finish, Prepared
from setpoint.core.request import Ids, Request

NUM_THREADS = 2
MAX_GIVEN_UP = 8
"""Maximum number of threads that work on grammars for which no request waits."""


@dataclass(slots=True, eq=False)
class _Job:
    """One grammar to make, or to make ready. Fields are written by the loop under the lock, except
    ``grammar``."""

    seq_id: int
    request: Request | None = None
    """The request for which to make a grammar; None if there is a grammar."""
    outputs: Ids | None = None
    is_cancelled: bool = False
    is_running: bool = False
    is_given_up: bool = False
    """Whether another thread has replaced the one that works on this job."""
    grammar: Grammar | None = None
    """The result; a new one is set by the thread before it posts Prepared."""


class GrammarThreads:
    """Implements Preparer. post: puts a message into the loop's inbox; may be called from any
    thread."""

    def __init__(self, factory: GrammarFactory, post: Callable[[Prepared], None]) -> None:
        self._factory = factory
        self._post = post
        self._changed = threading.Condition()
        """Guards all fields below."""
        self._jobs: dict[int, _Job] = {}
        """Jobs that were started, and neither taken nor cancelled."""
        self._waiting: dict[int, _Job] = {}
        """Jobs that no thread has begun yet, in order."""
        self._num_given_up = 0
        for _ in range(NUM_THREADS):
            self._start_thread()

    def prepare(self) -> None:
        """Do the factory's slow work, in the caller's thread."""
        self._factory.prepare()

    def needs(self, seq_id: int, request: Request) -> bool:
        return self._factory.constrains(request)

    def start(self, seq_id: int, request: Request, outputs: Ids) -> None:
        self._add(_Job(seq_id, request, outputs))

    def make_ready(self, seq_id: int, grammar: Grammar) -> None:
        self._add(_Job(seq_id, grammar=grammar))

    def _add(self, job: _Job) -> None:
        with self._changed:
            self._jobs[job.seq_id] = self._waiting[job.seq_id] = job
            self._changed.notify()

    def take(self, seq_id: int) -> Grammar | None:
        with self._changed:
            return self._jobs.pop(seq_id).grammar

    def cancel(self, seq_id: int) -> None:
        with self._changed:
            job = self._jobs.pop(seq_id)
            job.is_cancelled = True
            self._waiting.pop(seq_id, None)
            if job.is_running and self._num_given_up < MAX_GIVEN_UP:
                self._num_given_up += 1
                job.is_given_up = True
                self._start_thread()

    def _start_thread(self) -> None:
        # A daemon thread, so that one that never finishes does not keep the process alive.
        threading.Thread(target=self._work, name="grammar", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                job = self._waiting.pop(next(iter(self._waiting)))
                job.is_running = True
            message = self._prepare(job)
            with self._changed:
                job.is_running = False
                if not job.is_cancelled:
                    self._post(message)
                if job.is_given_up:
                    self._num_given_up -= 1
                    return

    def _prepare(self, job: _Job) -> Prepared:
        began, finish, is_cached = time.perf_counter(), None, False
        try:
            if job.request is not None:
                assert job.outputs is not None
                is_cached = self._factory.is_cached(job.request)
                grammar = self._factory(job.request, lambda: not job.is_cancelled)
                job.grammar = behind(grammar, job.outputs)
            elif job.grammar is not None:
                job.grammar.make_ready()
        except Exception as error:
            finish = finish_of(error)
        return Prepared(job.seq_id, finish, time.perf_counter() - began, is_cached)


def behind(grammar: Grammar, outputs: Ids) -> Grammar:
    """The grammar after it has accepted the outputs that exist, ready for the next token."""
    for token in outputs.tolist():
        grammar.accept(token)
    grammar.make_ready()
    return grammar


def finish_of(error: Exception) -> Finish:
    """The Finish of a request whose grammar could not be made."""
    if isinstance(error, RequestError):
        return refusal_finish(error)
    return failure_finish(log_failure("making its grammar", error))
