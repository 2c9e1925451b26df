"""The errors that a user or a client can see, each with its message and its exit or status code.

``assert`` is for programmers; these errors are for people outside the code. This module knows
nothing of HTTP frameworks: an error holds the status code, and the frontend chooses the JSON shape
of each route.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from setpoint.core.lack import Lack


class SetpointError(Exception):
    """Base class of every error that a user reads: one sentence that says what is wrong and what to
    do."""


class ConfigError(SetpointError):
    """An option, or a combination of options, that cannot be honoured. Ends start-up with exit code
    2."""


class CheckpointError(SetpointError):
    """A model that cannot be found, read or understood. Ends start-up with exit code 1."""


class RecordingError(SetpointError):
    """A recording cannot be written, read or replayed."""


class UnsupportedModelError(CheckpointError):
    """A model of an architecture that is not supported. architecture: its name; supported: the
    names of those that are."""

    def __init__(self, message: str, *, architecture: str, supported: Collection[str]) -> None:
        super().__init__(message)
        self.architecture = architecture
        self.supported = supported


class OutOfMemoryError(SetpointError):
    """The machine has too little memory for the weights or for one page of KV cache. Ends start-up
    with exit code 1."""


class StepOutOfMemoryError(OutOfMemoryError):
    """The device had too little memory for a step, whose results are lost. The executor has given
    back what the step held and what the allocator kept, and can run another step.

    is_final: others compute in step with this executor, so that it cannot leave a step out.
    """

    def __init__(self, lack: Lack, *, is_final: bool = False) -> None:
        super().__init__(lack.why)
        self.lack = lack
        self.is_final = is_final


class SourceError(SetpointError):
    """A log, file, folder or server that the doctor cannot read: missing, empty, binary, silent, or
    not about an engine. Ends the command with exit code 2."""


class ForeignLogError(SourceError):
    """A log in which no line is SGLang's or Setpoint's. Beside a log of a server it is left out."""


ERR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
"""HTTP status -> ``err_type``: the names that SGLang and the exceptions of OpenAI's Python client
have."""


def err_type_of(status_code: int) -> str:
    """The name of the kind of error; one without a name is called like 400 or 500."""
    return ERR_TYPES.get(status_code) or ERR_TYPES[400 if status_code < 500 else 500]


class RequestError(SetpointError):
    """A request that is refused or aborted; the server keeps running.

    status_code: the HTTP status; retry_after_s: when to try again, if that is known.
    """

    code: ClassVar[str | None] = None
    """OpenAI's code for the error, if clients act on one."""

    def __init__(
        self,
        message: str,
        *,
        status_code: int = 400,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.retry_after_s = retry_after_s

    @property
    def err_type(self) -> str:
        """SGLang's name of the kind of error."""
        return err_type_of(self.status_code)


class ContextLengthError(RequestError):
    """The prompt and the requested output together are longer than the context or the KV pool.

    num_prompt: tokens of a prompt that is too long by itself, or the least that it can have;
    max_prompt: the most that a prompt may have. None: only the requested output makes it too long.
    """

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, num_prompt: int | None = None, max_prompt: int | None = None
    ) -> None:
        super().__init__(message)
        self.num_prompt = num_prompt
        self.max_prompt = max_prompt


class EngineDeadError(SetpointError):
    """No engine is ready, or the engine that had the request has ended; the message says why."""


def reason_of(error: Exception) -> str:
    """The exception's message without its full stop, to be put into a sentence; the name of its
    type if it has no message."""
    return str(error).rstrip(".") or type(error).__name__
