"""Errors as HTTP responses (docs/sglang/api.md#errors), and the handlers that produce them.

Two shapes for refusals: flat ``{"object":"error","message",…}`` on the OpenAI routes, for HTTP-level errors and for bodies
that do not validate; ``{"error":{"message"}}`` on the native routes.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from setpoint.core.errors import EngineDeadError, RequestError, SetpointError
from setpoint.frontend.bodies import InvalidBodyError, as_request_error, flat_error
from setpoint.frontend.jobs import ClientGoneError
from setpoint.frontend.native import UnknownSamplingKeyError

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for "nobody is there to read this"."""


def json_response(content: Any, *, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status_code, media_type="application/json")


def openai_stream_error(error: SetpointError) -> dict[str, Any]:
    refusal = as_request_error(error)
    return {"error": flat_error(refusal.message, code=refusal.status_code, err_type=refusal.err_type)}


def native_stream_error(error: SetpointError) -> dict[str, Any]:
    refusal = as_request_error(error)
    err_type = refusal.err_type or HTTPStatus(refusal.status_code).name
    return {"error": {"message": refusal.message, "type": err_type, "code": refusal.status_code, "retryable": False}}


def nested_error(message: str, *, code: str, err_type: str, param: str | None, status_code: int) -> Response:
    error = {"message": message, "type": err_type, "param": param, "code": code}
    return json_response({"error": error}, status_code=status_code)


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
    refusal = as_request_error(error)
    code = refusal.status_code
    if isinstance(refusal, UnknownSamplingKeyError):
        return json_response({"error": refusal.message}, status_code=code)
    if request.url.path.startswith("/v1/") or isinstance(refusal, InvalidBodyError):
        return json_response(flat_error(refusal.message, code=code, err_type=refusal.err_type), status_code=code)
    if code >= 500:
        return json_response(flat_error(refusal.message, code=code, err_type=str(code)), status_code=code)
    return json_response({"error": {"message": refusal.message}}, status_code=code)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    content = flat_error(str(error.detail), code=error.status_code, err_type=str(error.status_code))
    response = json_response(content, status_code=error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _on_bad_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    return json_response(flat_error(message, code=400, err_type="Bad Request"), status_code=400)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> Response:
    # The framework raises the error again after this answer, so the server logs its traceback.
    content = flat_error("Internal server error; the server's log has the details.", code=500, err_type="InternalServerError")
    return json_response(content, status_code=500)
