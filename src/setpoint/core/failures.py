"""What fails for one request alone: its traceback goes to the log, a sentence to its client, and
the others go on.

Caught one by one where work is done request by request (admission, sampling, masks, results,
events). What raises in the work that a step does for all its requests together is not caught:
nobody can say whose fault it is.
"""

from __future__ import annotations

import logging

from setpoint.core.errors import RequestError
from setpoint.core.messages import Finish

logger = logging.getLogger(__name__)


def failure(doing: str, error: Exception) -> str:
    """Log ``error``, which ``doing`` something for one request raised; the sentence for its
    client."""
    logger.error(
        "A request failed: %s raised %s; the others go on.",
        doing,
        type(error).__name__,
        exc_info=error,
    )
    return (
        f"This request failed inside the server: {doing} raised {type(error).__name__}; the"
        " server's log has the details."
    )


def refused(error: RequestError) -> Finish:
    return Finish(
        "abort", message=error.message, status_code=error.status_code, err_type=error.err_type
    )


def failed(why: str) -> Finish:
    return Finish("abort", message=why, status_code=500, err_type="InternalServerError")
