"""Routes that parse text as the chat routes parse an answer (docs/tools-and-reasoning.md)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.errors import ConfigError, RequestError
from setpoint.frontend.apis.openai.bodies.tool_fields import FunctionTool, tools_of
from setpoint.frontend.apis.sglang.controls import ControlBodies
from setpoint.frontend.chat.deltas import Answer, Delta, join_deltas
from setpoint.frontend.chat.formats.format_registry import reasoning_format, tool_format
from setpoint.frontend.chat.parser import DeltaParser, PlainParser
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.jobs import ClientGoneError

MAX_CHARS = 1 << 20
"""Maximum length of a text: an answer of some 200,000 tokens."""
SLICE_CHARS = 1 << 14
"""Characters that are parsed before the route checks whether its client is still connected; this
takes some 10 ms."""


class ParseFunctionCallBody(msgspec.Struct):
    text: str
    tools: list[FunctionTool] = []
    tool_call_parser: str | None = None
    """If None, the server's."""


class SeparateReasoningBody(msgspec.Struct):
    text: str
    reasoning_parser: str | None = None
    """None: the server's."""


class ParsingRoutes:
    def __init__(self, config: FrontendConfig, bodies: ControlBodies) -> None:
        self._bodies = bodies
        self._config = config

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("native")
        routes.add("/parse_function_call", self.calls, "POST", body=ParseFunctionCallBody)
        routes.add("/separate_reasoning", self.reasoning, "POST", body=SeparateReasoningBody)

    async def calls(self, request: Request) -> Response:
        body, told = await self._bodies.read(request, ParseFunctionCallBody)
        name = _chosen("tool_call_parser", body.tool_call_parser, self._config.tool_call_parser)
        try:
            parser = tool_format(name).parser(tools_of(body.tools))
        except ConfigError as error:
            raise RequestError(f"tool_call_parser: {error}") from None
        answer = await _answer(request, parser, body.text)
        calls: list[dict[str, Any]] = [
            {"tool_index": call.index, "name": call.name, "parameters": call.arguments}
            for call in answer.calls
        ]
        return json_response({"normal_text": answer.text, "calls": calls, **told})

    async def reasoning(self, request: Request) -> Response:
        body, told = await self._bodies.read(request, SeparateReasoningBody)
        name = _chosen("reasoning_parser", body.reasoning_parser, self._config.reasoning_parser)
        try:
            form = reasoning_format(name)
        except ConfigError as error:
            raise RequestError(f"reasoning_parser: {error}") from None
        own = self._config.tool_call_parser
        calls = None if own == "none" else tool_format(own)
        parser = form.parser(PlainParser(), starts_inside=form.starts_inside(), calls=calls)
        answer = await _answer(request, parser, body.text)
        return json_response({"reasoning_text": answer.reasoning, "text": answer.text, **told})


def _chosen(key: str, wanted: str | None, own: str) -> str:
    """The name of the format to use. Raises RequestError (400) if neither the body nor the server
    names one."""
    name = own if wanted in (None, "auto") else wanted
    if name is None or name == "none":
        raise RequestError(
            f"{key} must name a format here: the model's chat template shows none that this server"
            " could use by itself (docs/tools-and-reasoning.md lists them)."
        )
    return name


async def _answer(request: Request, parser: DeltaParser, text: str) -> Answer:
    """Parse a text in slices, so that the work stops when the client disconnects. Raises
    RequestError (400) for a text that is longer than any answer."""
    if len(text) > MAX_CHARS:
        raise RequestError(f"text must have at most {MAX_CHARS} characters, got {len(text)}.")
    deltas: list[Delta] = []
    for at in range(0, len(text), SLICE_CHARS):
        deltas += await asyncio.to_thread(parser.feed, text[at : at + SLICE_CHARS])
        if await request.is_disconnected():
            raise ClientGoneError
    deltas += await asyncio.to_thread(parser.end)
    return await asyncio.to_thread(join_deltas, deltas)
