"""Why a request gets no answer, before an API gives that its shape."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from setpoint.core.errors import RequestError, SetpointError


@dataclass(slots=True, frozen=True, kw_only=True)
class Refusal:
    message: str
    status_code: int
    """HTTP's."""
    err_type: str = ""
    """The word for the kind of error; "" for the name of the status."""
    param: str | None = None
    """The field of the body, or the part of the path, that is wrong."""
    code: str | None = None
    """An API's own word for the error, where it has one."""

    @property
    def kind(self) -> str:
        return self.err_type or HTTPStatus(self.status_code).name


def refusal_of(error: SetpointError) -> Refusal:
    """The engine's death is the refusal of one request, too."""
    if isinstance(error, RequestError):
        return Refusal(
            message=error.message, status_code=error.status_code, err_type=error.err_type
        )
    return Refusal(message=str(error), status_code=503, err_type="SERVICE_UNAVAILABLE")
