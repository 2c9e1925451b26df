"""Errors as HTTP responses, and the handlers that produce them. One shape on every route:
``bodies.error_body``."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from setpoint.core.errors import EngineDeadError, RequestError, SetpointError
from setpoint.frontend.bodies import as_request_error, error_body
from setpoint.frontend.http.routes import advice_for
from setpoint.frontend.jobs import ClientGoneError

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for "nobody is there to read this"."""


def json_response(content: Any, *, status_code: int = 200) -> Response:
    return Response(
        msgspec.json.encode(content), status_code=status_code, media_type="application/json"
    )


def error_response(
    message: str,
    *,
    status_code: int,
    err_type: str = "",
    param: str | None = None,
    code: str | None = None,
) -> Response:
    """``code``: OpenAI's word for the error, where it has one; the status otherwise."""
    content = error_body(
        message,
        code=code or status_code,
        err_type=err_type or HTTPStatus(status_code).name,
        param=param,
    )
    return json_response(content, status_code=status_code)


def refused(error: SetpointError) -> dict[str, Any]:
    """The body, or the last event of a stream, that tells of ``error``."""
    refusal = as_request_error(error)
    err_type = refusal.err_type or HTTPStatus(refusal.status_code).name
    return error_body(refusal.message, code=refusal.status_code, err_type=err_type)


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RequestError, _on_refusal)
    app.add_exception_handler(EngineDeadError, _on_refusal)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_bad_query)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, SetpointError)
    return json_response(refused(error), status_code=as_request_error(error).status_code)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router say where to go instead; others keep their own words."""
    assert isinstance(error, HTTPException)
    advice = advice_for(request, error.status_code)
    response = error_response(
        advice or str(error.detail), status_code=error.status_code, err_type=str(error.status_code)
    )
    response.headers.update(error.headers or {})
    return response


async def _on_bad_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message = "; ".join(
        f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
    )
    return error_response(message, status_code=400, err_type="Bad Request")


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> Response:
    # The framework raises the error again after this answer, so the server logs its traceback.
    message = "Internal server error; the server's log has the details."
    return error_response(message, status_code=500, err_type="InternalServerError")
