"""Errors that concern a single request or a single operation: the traceback goes to the log, a
sentence goes to the client, and everything else continues.

Such errors are caught wherever work is done request by request (admission, sampling, masks,
results, events) and around every operation. An exception in the work that a step does for all its
requests together is not caught, because nobody can say which request caused it.
"""

from __future__ import annotations

import logging

from setpoint.core.errors import RequestError
from setpoint.core.messages import Finish

logger = logging.getLogger(__name__)


def log_failure(doing: str, error: Exception) -> str:
    """Log ``error``, which ``doing`` raised for one request. Returns the sentence for that
    request's client."""
    logger.error(
        "A request failed: %s raised %s. The other requests continue.",
        doing,
        type(error).__name__,
        exc_info=error,
    )
    return (
        f"This request failed inside the server: {doing} raised {type(error).__name__}; the"
        " server's log has the details."
    )


def log_operation_failure(name: str, error: Exception) -> str:
    """Log ``error``, which an operation raised. Returns the sentence for its client."""
    logger.error(
        "An operation failed: %s raised %s. The engine continues.",
        name,
        type(error).__name__,
        exc_info=error,
    )
    return (
        f"This operation failed inside the server: {name} raised {type(error).__name__}; the"
        " server's log has the details."
    )


def refusal_finish(error: RequestError) -> Finish:
    """The end of a request that is refused with ``error``."""
    return Finish(
        "abort", message=error.message, status_code=error.status_code, err_type=error.err_type
    )


def failure_finish(why: str) -> Finish:
    """The end of a request that failed inside the server (status 500)."""
    return Finish("abort", message=why, status_code=500, err_type="InternalServerError")
