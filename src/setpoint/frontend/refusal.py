"""The reason why a request gets no answer, before an API puts it into its own shape."""

from __future__ import annotations

from dataclasses import dataclass

from setpoint.core.errors import ContextLengthError, RequestError, SetpointError
from setpoint.core.messages import Finish

RETRY_AFTER_S = 5
"""When a client should try again that was refused because there is no engine or the server ends: by
then a load balancer has noticed that this server is not ready, or the next one has started."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Refusal:
    message: str
    status_code: int
    """The HTTP status."""
    param: str | None = None
    """The field of the body or the part of the path that is wrong."""
    code: str | None = None
    """OpenAI's code for the error, if clients act on one that does not follow from the status."""
    excess: tuple[int, int] | None = None
    """The tokens of a prompt that is too long (or the least that it can have), and the most that a
    prompt may have."""
    retry_after_s: int | None = None
    """When to try again, if that is known."""


def refusal_of(error: SetpointError) -> Refusal:
    """The Refusal for an error; the engine's death refuses each open request."""
    if isinstance(error, RequestError):
        return Refusal(
            message=error.message,
            status_code=error.status_code,
            code=error.code,
            excess=_excess_of(error),
            retry_after_s=error.retry_after_s,
        )
    return Refusal(message=str(error), status_code=503, retry_after_s=RETRY_AFTER_S)


def _excess_of(error: RequestError) -> tuple[int, int] | None:
    if not isinstance(error, ContextLengthError):
        return None
    if error.num_prompt is None or error.max_prompt is None:
        return None
    return error.num_prompt, error.max_prompt


def error_of_abort(finish: Finish) -> RequestError:
    """An aborted request as an error, for an API that has no finish reason for it: 503 if the
    server ended it, which the client may try again, else 400."""
    message = finish.message or "The request was aborted."
    if finish.err_type is None:
        return RequestError(message)
    return RequestError(message, status_code=503)
