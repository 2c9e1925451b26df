"""The access log, as ASGI middleware: one line for each HTTP request when its answer ends. The line
says how long the request took, where the time of a generating request went, and why a refused
request was refused."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.utils import get_client_addr, get_path_with_query_string

from setpoint.core.excerpt import excerpt
from setpoint.frontend.arrival import ARRIVED_AT, IN_SCOPE, Arrival

if TYPE_CHECKING:
    from setpoint.frontend.jobs import SequenceOutput

logger = logging.getLogger("uvicorn.access")  # the name by which its level is set

LINE = '%s - "%s %s HTTP/%s" %d, %s'
"""uvicorn's line, followed by a description of the request."""


class AccessLogMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        came = scope[IN_SCOPE] = Arrival(scope.get(ARRIVED_AT) or time.perf_counter())
        status = 500  # of an exception, which the framework answers outside of this middleware

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            log_access(scope, status, came)


def log_access(scope: Scope, status: int, came: Arrival) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    logger.info(
        LINE,
        get_client_addr(scope),  # type: ignore[arg-type]
        scope["method"],
        excerpt(get_path_with_query_string(scope)),  # type: ignore[arg-type]
        scope["http_version"],
        status,
        describe(came),
    )


def describe(came: Arrival) -> str:
    """A request in words: its duration, its figures if it generated, and why it was refused."""
    parts = [f"{time.perf_counter() - came.at:.3f} s"]
    if came.outputs:
        parts.append(
            figures(came.outputs, came.at, "in the background" if came.is_in_background else "left")
        )
    if came.refusal:
        parts.append(f"refused: {excerpt(came.refusal)}")
    return ", ".join(parts)


def figures(outputs: Sequence[SequenceOutput], arrived_at: float, unfinished: str) -> str:
    """The figures of a request. If it has several sequences: the longest waits, the first token of
    all, and the sums of their tokens. unfinished: what to say of one that has not ended."""
    others = f" and {len(outputs) - 1} more" if len(outputs) > 1 else ""
    parts = [f"rid={excerpt(outputs[0].rid)}{others}"]
    waits = [output.timing.waiting_s for output in outputs if output.timing is not None]
    if held := max(output.held_s for output in outputs):
        parts.append(f"load {held:.3f} s")
    if waits:
        parts.append(f"queue {max(waits):.3f} s")
    firsts = [each.first_token_at for each in outputs if each.first_token_at is not None]
    if firsts:
        parts.append(f"first token {min(firsts) - arrived_at:.3f} s")
    for name, count in (
        ("prompt", sum(output.num_prompt for output in outputs)),
        ("cached", sum(output.num_cached for output in outputs)),
        ("output", sum(output.num_outputs for output in outputs)),
    ):
        parts.append(f"{name} {count}")
    ends = [unfinished if output.finish is None else output.finish.type for output in outputs]
    parts.append("/".join(dict.fromkeys(ends)))
    return ", ".join(parts)
