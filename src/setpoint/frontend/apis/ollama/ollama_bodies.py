"""The bodies of Ollama's routes (docs/ollama.md), and their conversion to the neutral chat's
request. Pure data and conversions; knows nothing of the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from setpoint.core.errors import RequestError
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.frontend.apis.ollama.keep_alive import keep_seconds
from setpoint.frontend.apis.ollama.sampling_options import OptionsBody
from setpoint.frontend.apis.openai.bodies.tool_fields import FunctionTool, tools_of
from setpoint.frontend.bodies import other_model_warning
from setpoint.frontend.chat.chat_request import ChatRequest
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.intake import check_key

UNSUPPORTED = ("suffix", "template", "images", "width", "height", "steps")
"""Keys of ``/api/generate`` that are refused by name."""

TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Think = bool | Literal["low", "medium", "high"]


class FunctionBody(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | None = None


class CallBody(msgspec.Struct):
    function: FunctionBody
    id: str = ""


class MessageBody(msgspec.Struct):
    role: str
    content: str | None = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[CallBody] | None = None
    tool_name: str | None = None
    """The name of the tool, in the result of a call."""
    tool_call_id: str | None = None


class AnyBody(msgspec.Struct, kw_only=True):
    model: str
    keep_alive: float | str | None = None
    """How long the model stays loaded after the request: seconds, or text such as "5m"; less than
    0: until another model needs its room. It has no effect on a server with one model."""
    options: OptionsBody | None = None

    @property
    def keep_s(self) -> float:
        """``keep_alive`` in seconds. Raises RequestError (400) for a text that is no duration."""
        return keep_seconds(self.keep_alive)

    @property
    def own_options(self) -> OptionsBody:
        return self.options or OptionsBody()

    def warnings(self, config: FrontendConfig) -> list[str]:
        """Warnings for the client about its body. Raises RequestError (400)."""
        return [
            *self.own_options.warnings(config.max_model_len),
            *_other_model(self.model, config.served_model_name),
        ]


class TextBody(AnyBody, kw_only=True):
    """The common fields of the two bodies that ask for text."""

    stream: bool | None = True
    format: str | dict[str, Any] | None = None
    think: Think | None = None
    logprobs: bool | None = False
    top_logprobs: TopLogprobs | None = 0

    @property
    def is_stream(self) -> bool:
        return self.stream is not False

    def warnings(self, config: FrontendConfig) -> list[str]:
        if self.think and config.reasoning_parser == "none":
            raise RequestError(
                "think: this model does not think, or the server was started without the"
                " --reasoning-parser for its format."
            )
        return super().warnings(config)

    def schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must satisfy. Raises RequestError (400)."""
        if self.format is None or self.format == "":
            return None
        if isinstance(self.format, dict):
            return self.format
        if self.format != "json":
            raise RequestError('format must be "json" or a JSON schema.')
        return {"type": "object"}

    def request_options(self) -> RequestOptions:
        return RequestOptions(
            stream=self.is_stream,
            logprobs=LogprobOptions(top=self.top_logprobs or 0) if self.logprobs else None,
        )

    def chat_request(
        self,
        messages: Sequence[Mapping[str, Any]],
        defaults: Mapping[str, float],
        *,
        tools: list[FunctionTool] | None = None,
    ) -> ChatRequest:
        """The request of the neutral chat. Raises RequestError (400)."""
        return ChatRequest(
            messages=messages,
            sampling=self.own_options.sampling(defaults, self.schema()),
            options=self.request_options(),
            tools=tools_of(tools),
            thinking=None if self.think is None else bool(self.think),
            variables={"reasoning_effort": self.think} if isinstance(self.think, str) else {},
        )


class OllamaChatBody(TextBody, kw_only=True):
    messages: list[MessageBody] = msgspec.field(default_factory=list)
    tools: list[FunctionTool] | None = None

    def history(self) -> list[dict[str, Any]]:
        """The messages for a chat template. Raises RequestError (400) for images of the user,
        and for a tool result without an earlier call."""
        history = []
        unanswered = _Unanswered([])
        for index, message in enumerate(self.messages):
            if message.images and message.role != "tool":
                raise RequestError(f"messages[{index}].images: this model reads only text.")
            neutral: dict[str, Any] = {"role": message.role, "content": message.content or ""}
            if message.images:
                text = {"type": "text", "text": neutral["content"]}
                neutral["content"] = [text, *({"type": "image"} for _ in message.images)]
            if message.thinking:
                neutral["reasoning_content"] = message.thinking
            if message.tool_calls:
                ids = [
                    call.id or f"call_{index}_{number}"
                    for number, call in enumerate(message.tool_calls)
                ]
                calls = list(map(_call, ids, message.tool_calls))
                neutral["tool_calls"] = calls
                unanswered = _Unanswered(calls)
            if message.role == "tool":
                neutral |= _result_fields(message, unanswered, f"messages[{index}]")
            history.append(neutral)
        return history


class OllamaGenerateBody(TextBody, kw_only=True):
    prompt: str | None = ""
    system: str | None = None
    raw: bool | None = False
    context: list[int] | None = None
    """The token ids of an earlier answer's ``context``: the conversation goes on after them."""

    def warnings(self, config: FrontendConfig) -> list[str]:
        if self.raw and self.context:
            raise RequestError("context cannot be combined with raw.")
        return super().warnings(config)

    def history(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt or ""}]


class EmbedBody(AnyBody, kw_only=True):
    input: str | list[str]
    truncate: bool | None = True
    """False: a text that is longer than the context is refused instead of truncated."""
    dimensions: int | None = None


class EmbeddingsBody(AnyBody, kw_only=True):
    prompt: str


class ModelBody(msgspec.Struct, kw_only=True):
    """A body about a model that does not ask for text."""

    model: str | None = None
    name: str | None = None
    """The older name of ``model``."""

    def warnings(self, served: str) -> list[str]:
        """Warnings for the client. Raises RequestError (400) if the body names no model."""
        name = self.model or self.name
        if name is None:
            raise RequestError("model is missing.")
        return _other_model(name, served)


class ShowBody(ModelBody, kw_only=True):
    verbose: bool | None = False


class PullBody(ModelBody, kw_only=True):
    stream: bool | None = True
    insecure: bool | None = False
    """Whether a download may be unencrypted. Has no effect, because nothing is downloaded."""


def _other_model(name: str, served: str) -> list[str]:
    """A warning if the client's name for the model, with or without a tag, is not that of the
    served model, which answers under any name."""
    check_key(name, "model")
    if name.removesuffix(":latest") in (served, "default"):
        return []
    return [other_model_warning(name, served)]


_ANY_CALL = "any", None


def _call(call_id: str, call: CallBody) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments or {}}
    return {"id": call_id, "type": "function", "function": function}


class _Unanswered:
    """The calls of one message that have no result yet. The time to find one does not depend on
    their number."""

    def __init__(self, calls: Sequence[Mapping[str, Any]]) -> None:
        self._calls = dict(enumerate(calls))
        self._found: dict[tuple[str, str | None], deque[int]] = {}
        """Id or tool name of a call -> the numbers of such calls, in order."""
        for number, call in self._calls.items():
            for known in (("id", call["id"]), ("name", call["function"]["name"]), _ANY_CALL):
                self._found.setdefault(known, deque()).append(number)

    def take(self, call_id: str | None, name: str | None) -> Mapping[str, Any] | None:
        """Remove and return the call of a result: the call with its id, otherwise the first call of
        its tool, otherwise, for a result without an id, the first call. None if there is none."""
        for known in (("id", call_id), ("name", name), *([_ANY_CALL] if call_id is None else [])):
            numbers = self._found.get(known, ())
            while numbers:
                call = self._calls.pop(numbers.popleft(), None)
                if call is not None:
                    return call
        return None


def _result_fields(message: MessageBody, unanswered: _Unanswered, where: str) -> dict[str, Any]:
    """The fields that identify the call to which a result belongs."""
    call = unanswered.take(message.tool_call_id, message.tool_name)
    if call is None:
        raise RequestError(
            f"{where} is a tool result, but no earlier call is waiting for a result."
        )
    return {"tool_call_id": call["id"], "name": call["function"]["name"]}
