"""Runs a chat template in a separate process, which can be ended. A checkpoint's template is a
program by a stranger. In a thread, nothing could stop one that loops for ever or that builds a
string as large as the memory in one Python operation. In a process, the kernel can
(``template_worker`` has the limits): the request then gets an error, the next one a new process,
and no other request is affected.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import msgspec

from setpoint.core.errors import CheckpointError, RequestError
from setpoint.frontend.text.template import cannot_compile, cannot_render
from setpoint.frontend.text.template_source import find_chat_template
from setpoint.frontend.text.template_worker import (
    CPU_SECONDS,
    DONE,
    MEMORY_BYTES,
    OUT_OF_MEMORY,
    RenderJob,
    TemplateJob,
    read,
    write,
)

_COMMAND = (sys.executable, "-m", "setpoint.frontend.text.template_worker")
_OURS = (signal.SIGINT, signal.SIGTERM)
"""Blocked in the process: Ctrl-C reaches every process of a terminal, but this one ends when its
input does."""


class _EndedError(Exception):
    """The process ended in the middle of its work; the message says why."""


class TemplateProcess:
    """Like ``template.ChatTemplate``, in another process. Its methods block, so they are for
    threads; it serves one at a time."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        """Start the process. Raises CheckpointError for a template that cannot be compiled."""
        self.source = source
        self._job = msgspec.json.encode(TemplateJob(source, dict(special_tokens or {})))
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Like ``ChatTemplate.render``. Also raises RequestError (400) for messages with which the
        template exceeds a limit."""
        try:
            job = msgspec.json.encode(
                RenderJob(list(messages), add_generation_prompt, dict(variables or {}))
            )
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(cannot_render(f"they cannot be encoded as JSON: {error}")) from None
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                answer = self._ask(job)
            except (_EndedError, CheckpointError) as error:
                raise RequestError(cannot_render(str(error))) from None
            except OSError as error:
                raise RequestError(
                    f"The chat template's process cannot be started: {error.strerror}.",
                    status_code=503,
                ) from None
        if answer[:1] != DONE:
            raise RequestError(answer[1:].decode())
        return answer[1:].decode()

    def exceeded(self) -> str | None:
        """Which limit the template exceeds even with a short conversation; None if it exceeds none.
        What else it refuses depends on the conversation."""
        job = msgspec.json.encode(RenderJob([{"role": "user", "content": "Hello"}], True, {}))
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                self._ask(job)
            except _EndedError as error:
                return str(error)
        return None

    def close(self) -> None:
        """End the process. A request that is being rendered gets an error."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.kill()  # the process has no state to lose
        process.wait()
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()

    def _start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
        try:
            self._process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            answer = self._ask(self._job)
        except _EndedError as error:
            raise CheckpointError(cannot_compile(str(error))) from None
        if answer[:1] != DONE:
            raise CheckpointError(answer[1:].decode())

    def _ask(self, data: bytes) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            write(process.stdin, data)
        answer = read(process.stdout)
        if answer is None:
            code = process.wait()
            self.close()
            raise _EndedError(_ending(code))
        return answer


def _ending(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it computes for more than {CPU_SECONDS:g} s"
    if code == OUT_OF_MEMORY:
        return f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"
    return (
        f"the process that runs it was ended by {signal.Signals(-code).name}"
        if code < 0
        else f"its process ended with exit code {code}"
    )


def check_template_file(path: str) -> None:
    """Raise CheckpointError or ConfigError if the template in a file of --chat-template cannot be
    read or compiled, or exceeds a limit. It runs in its own process even here: what it computes may
    take for ever."""
    source = find_chat_template("", override=path) or ""
    try:
        template = TemplateProcess(source)
    except CheckpointError as error:
        raise CheckpointError(f"--chat-template {path}: {error}") from None
    with closing(template):
        if (limit := template.exceeded()) is not None:
            raise CheckpointError(f"--chat-template {path} cannot be used: {limit}.")
