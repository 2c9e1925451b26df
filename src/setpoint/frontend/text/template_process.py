"""Runs a chat template in a separate process, which can be ended. A checkpoint's template is a
program by a stranger. In a thread, nothing could stop one that loops for ever or that builds a
string as large as the memory in one Python operation. In a process, the kernel can
(``template_worker`` has the limits): the request then gets an error, the next one a new process,
and no other request is affected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import msgspec

from setpoint.core.errors import CheckpointError, RequestError
from setpoint.frontend.text.template import cannot_compile, cannot_render
from setpoint.frontend.text.template_source import find_chat_template
from setpoint.frontend.text.template_worker import DONE, LIMITS, RenderJob, TemplateJob
from setpoint.sandbox.child import ChildLostError, LimitedChild, TooMuchError

_MODULE = "setpoint.frontend.text.template_worker"


class TemplateProcess:
    """Like ``template.ChatTemplate``, in another process. Its methods block, so they are for
    threads; it serves one at a time."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        """Start the process. Raises CheckpointError for a template that cannot be compiled."""
        self.source = source
        opening = msgspec.json.encode(TemplateJob(source, dict(special_tokens or {})))
        self._child = LimitedChild(_MODULE, LIMITS, opening=opening)
        try:
            answer = self._child.open()
        except (TooMuchError, ChildLostError) as error:
            self.close()
            raise CheckpointError(cannot_compile(f"it {error}")) from None
        if answer[:1] != DONE:
            self.close()
            raise CheckpointError(answer[1:].decode())

    @property
    def pid(self) -> int | None:
        """Id of the process; None while there is none."""
        return self._child.pid

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Like ``ChatTemplate.render``. Also raises RequestError: 400 for messages with which the
        template exceeds a limit, 503 if there is no process, or the system has ended two."""
        try:
            job = msgspec.json.encode(
                RenderJob(list(messages), add_generation_prompt, dict(variables or {}))
            )
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(cannot_render(f"they cannot be encoded as JSON: {error}")) from None
        try:
            answer = self._child.ask(job)
        except TooMuchError as error:
            raise RequestError(cannot_render(f"it {error}")) from None
        except ChildLostError as error:
            raise RequestError(
                f"The chat template's process {error}. Repeat the request later.", status_code=503
            ) from None
        if answer[:1] != DONE:
            raise RequestError(answer[1:].decode())
        return answer[1:].decode()

    def exceeded(self) -> str | None:
        """Which limit the template exceeds even with a short conversation; None if it exceeds none.
        What else it refuses depends on the conversation."""
        job = msgspec.json.encode(RenderJob([{"role": "user", "content": "Hello"}], True, {}))
        try:
            self._child.ask(job)
        except (TooMuchError, ChildLostError) as error:
            return f"it {error}"
        return None

    def close(self) -> None:
        """End the process. A request that is being rendered gets an error."""
        self._child.close()


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
