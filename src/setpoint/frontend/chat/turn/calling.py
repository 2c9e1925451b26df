"""How the answer to a chat may call tools: the format of its calls, and the constraint that makes
the model keep to that format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from setpoint.core.constraint import Constraint
from setpoint.core.errors import RequestError
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.chat.chat_request import ChatRequest, Tool
from setpoint.frontend.chat.formats.json_array import required_calls
from setpoint.frontend.chat.formats.structure import Format, structural_tag
from setpoint.frontend.chat.formats.tool_format import ToolFormat
from setpoint.frontend.chat.parser import DeltaParser, PlainParser, without_cut_call
from setpoint.frontend.chat.tools import visible_tools

_NOT_PARSED = (
    "This server has no format for the model's tool calls (--tool-call-parser is none), so calls"
    " stay in the text."
)


@dataclass(slots=True, frozen=True)
class Calling:
    tools: Sequence[Tool]
    """The tools that may be called."""
    form: ToolFormat | None
    """The format of the calls; None if no tool may be called or the format is not known."""
    structure: dict[str, Any] | None
    """The structural tag that constrains the calls; None if nothing constrains them."""
    is_required: bool = False
    warnings: Sequence[str] = ()
    """Warnings for the client."""

    def parser(self, tools: Sequence[Tool]) -> DeltaParser:
        """A parser for one answer. tools: all of the request's."""
        if self.form is None:
            return PlainParser()
        parser = self.form.parser(tools)
        if self.structure is None:
            return parser
        if self.is_required:
            return without_cut_call(parser, [""], ())
        form = self.structure["format"]
        return without_cut_call(parser, form["triggers"], [tag["end"] for tag in form["tags"]])


def calling_of(request: ChatRequest, form: ToolFormat | None) -> Calling:
    """The tools that the answer to a request may call, and how. form: the model's format; None if
    it is not known. Raises RequestError (400) for a choice that this format cannot honour."""
    tools = [
        tool
        for tool in visible_tools(request)
        if not request.allowed_tools or tool.name in request.allowed_tools
    ]
    if not tools:
        return Calling((), None, None)
    if request.tool_choice == "required":
        # A client that names a tool wants one call of it; a small model would call it again and
        # again until it reached a limit.
        parallel = request.parallel_tool_calls and not request.named_tool
        form, structure = required_calls(form, tools, parallel=parallel)
        return Calling(tools, form, structure, is_required=True)
    is_bound = any(tool.strict for tool in tools) or bool(request.allowed_tools)
    if not is_bound and request.parallel_tool_calls:
        return Calling(tools, form, None, warnings=() if form is not None else [_NOT_PARSED])
    bound = None
    if form is not None:
        bound = form.structure(tools, required=False, parallel=request.parallel_tool_calls)
    if bound is None:
        raise RequestError(
            "With this model, strict tools, allowed_tools and parallel_tool_calls=false need"
            " tool_choice required, because the format of its calls is not known or cannot be"
            " constrained."
        )
    return Calling(tools, form, bound)


def with_constraint(
    sampling: SamplingParams, request: ChatRequest, calling: Calling
) -> SamplingParams:
    """The sampling parameters with one constraint: the client's own on the text, the constraint on
    the calls, or a choice between the two."""
    own = sampling.constraint
    if calling.is_required or own is None:
        tag = calling.structure
    elif calling.form is None or own.kind == "structural_tag":
        return sampling
    else:
        parallel = request.parallel_tool_calls
        _, calls = required_calls(calling.form, calling.tools, parallel=parallel)
        tag = structural_tag({"type": "or", "elements": [_format(own), calls["format"]]})
    if tag is None:
        return sampling
    text = msgspec.json.encode(tag).decode()
    return msgspec.structs.replace(
        sampling, json_schema=None, regex=None, ebnf=None, structural_tag=text
    )


def _format(own: Constraint) -> Format:
    """A client's constraint as a part of a structural tag."""
    match own.kind:
        case "regex":
            return {"type": "regex", "pattern": own.text}
        case "ebnf":
            return {"type": "grammar", "grammar": own.text}
    try:
        schema = msgspec.json.decode(own.text)
    except msgspec.DecodeError as error:
        raise RequestError(f"json_schema is not valid JSON: {error}") from None
    return {"type": "json_schema", "json_schema": schema}
