"""The errors a user or a client can see, each with the words and the code it carries.

``assert`` is for programmers; these are for people outside the code. Knows nothing of HTTP
frameworks: an error holds the status code, and the frontend decides on the JSON shape of its route.
"""

from __future__ import annotations


class SetpointError(Exception):
    """Base of every error that is the user's to read: one sentence that says what is wrong and what
    to do."""


class ConfigError(SetpointError):
    """An option, or a combination of options, that cannot be honoured. Ends start-up with exit code
    2."""


class CheckpointError(SetpointError):
    """A model that cannot be found, read or understood. Ends start-up with exit code 1."""


class OutOfMemoryError(SetpointError):
    """The machine has no room for what was asked (weights, or one page of KV cache). Ends start-up
    with exit code 1."""


class RequestError(SetpointError):
    """A request that is refused or aborted; the server goes on.

    status_code: the HTTP status; err_type: SGLang's ``err_type`` word, e.g. "BadRequestError".
    """

    def __init__(
        self, message: str, *, status_code: int = 400, err_type: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.err_type = err_type


class ContextLengthError(RequestError):
    """Prompt and wanted output together are longer than the context, or than what the KV pool
    holds."""


class EngineDeadError(SetpointError):
    """No engine is ready, or the one that had the request is gone; the message says why."""
