"""The other side of ``processes``: runs in the nursery and in the processes that it forks."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np

from setpoint.core.constraint import Constraint
from setpoint.core.errors import RequestError
from setpoint.core.framing import Unpacker
from setpoint.grammar.masks import MASK_SHARE_S, NOTHING_ALLOWED
from setpoint.grammar.paced import Matcher
from setpoint.grammar.process_messages import (
    Advance,
    Compile,
    Compiled,
    Forget,
    FromProcess,
    MatcherState,
    Started,
    ToProcess,
    pack,
    to_process,
)
from setpoint.grammar.processes import COMPILE_S, MEMORY_BYTES, STATUS, TOKEN_S
from setpoint.sandbox.process_limits import limit_memory, limited_time


class CompiledConstraint(Protocol):
    """What a library has compiled."""

    num_bytes: int

    def start(self) -> Matcher:
        """The matcher of a new sequence."""
        ...


Compiler = Callable[[Constraint], CompiledConstraint]
"""Raises RequestError (400)."""


class _Children:
    """The processes that live, and where to write how each has ended."""

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        """Process -> the descriptor for its status."""
        signal.signal(signal.SIGCHLD, self._reap)

    def _reap(self, *_: object) -> None:
        with suppress(ChildProcessError):  # there is no child at all
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._tell(*ended)

    def _tell(self, pid: int, status: int) -> None:
        descriptor = self.statuses.pop(pid)
        with suppress(BrokenPipeError):  # nobody needs it any more
            os.write(descriptor, STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(descriptor)


def serve_forks(control: socket.socket, compiler: Compiler, *, vocab_size: int) -> None:
    """Fork a process for each pair of descriptors that arrives, for its messages and for the status
    with which it ends, until the other end is gone. The caller has one thread, and has made all
    that the processes share."""
    children = _Children()
    os.nice(5)  # the engine's own threads come first
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not data:
            return
        link, status = socket.socket(fileno=descriptors[0]), descriptors[1]
        # Nothing is reaped before it is known where to write its status.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            control.close()
            for each in (status, *children.statuses.values()):
                os.close(each)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a library writes may quote a client
            _limit_memory()
            _Server(link, compiler, vocab_size).run()
            os._exit(0)
        children.statuses[pid] = status
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        link.close()


def _limit_memory() -> None:
    pages = int(open("/proc/self/statm").read().split()[5])  # noqa: SIM115 - a file of the kernel
    limit_memory(resource.RLIMIT_DATA, pages * resource.getpagesize() + MEMORY_BYTES)


class _Server:
    """A process for one constraint."""

    def __init__(self, link: socket.socket, compiler: Compiler, vocab_size: int) -> None:
        self._link = link
        self._compiler = compiler
        self._compiled: CompiledConstraint | None = None
        self._matchers: dict[int, Matcher] = {}
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)

    def run(self) -> None:
        """Answer until the other end is gone, or a limit is reached."""
        unpacker = Unpacker()
        self._link.sendall(pack(Started(os.getpid())))
        while data := self._link.recv(1 << 16):
            for message in unpacker.feed(data):
                answer = self._answer(to_process.decode(message))
                if answer is not None:
                    self._link.sendall(pack(answer))

    def _answer(self, message: ToProcess) -> FromProcess | None:
        match message:
            case Compile(kind, text):
                with limited_time(COMPILE_S):
                    answer = self._compile(Constraint(kind, text))
                with limited_time(TOKEN_S):  # one that can match nothing, or is too slow, fails
                    return self._refuse_empty(answer)
            case Advance(number, tokens):
                with limited_time(TOKEN_S + MASK_SHARE_S * len(tokens)):
                    return self._advance(number, tokens)
            case Forget(number):
                self._matchers.pop(number, None)
                return None

    def _compile(self, constraint: Constraint) -> Compiled:
        try:
            self._compiled = self._compiler(constraint)
        except RequestError as error:
            return Compiled(0, error.message)
        return Compiled(self._compiled.num_bytes)

    def _refuse_empty(self, answer: Compiled) -> Compiled:
        """The answer, or a refusal if no token may begin an output."""
        if self._compiled is not None:
            self._mask[:] = 0
            self._compiled.start().fill_mask(self._mask)
            if not self._mask.any():
                return Compiled(0, NOTHING_ALLOWED)
        return answer

    def _advance(self, number: int, tokens: list[int]) -> MatcherState:
        began, error, terminated = time.thread_time(), "", False
        self._mask[:] = 0
        try:
            matcher = self._matchers.get(number)
            if matcher is None:
                assert self._compiled is not None
                matcher = self._matchers[number] = self._compiled.start()
            for token in tokens:
                matcher.accept(token)
            terminated = matcher.terminated
            if not terminated:
                matcher.fill_mask(self._mask)
        except RequestError as refused:
            error = refused.message
        seconds = time.thread_time() - began
        return MatcherState(number, terminated, self._mask.tobytes(), seconds, error)
