"""Implements ``/tokenize`` and ``/detokenize``, which convert text and conversations to token ids
and back, and ``/tokenizer_info``."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from setpoint.core.errors import RequestError
from setpoint.core.request import Ids
from setpoint.frontend.answering import Answering
from setpoint.frontend.apis.openai.bodies.tool_fields import FunctionTool
from setpoint.frontend.apis.openai.chat import ChatBody, ReasoningEffort, chat_request
from setpoint.frontend.bodies import as_id_lists
from setpoint.frontend.chat.turn.prepare import Chat
from setpoint.frontend.http.api_routes import Routes
from setpoint.frontend.http.body_reader import BodyReader
from setpoint.frontend.http.error_responses import json_response
from setpoint.frontend.intake import MAX_SEQUENCES

_UNSUPPORTED = ("chat_template", "mm_processor_kwargs", "media_io_kwargs")


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Either a prompt, or messages and the other fields from which the prompt of a chat is made."""

    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Any = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = False
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    """None: only for a prompt, because a chat template writes special tokens itself."""
    return_token_strs: bool | None = False
    """Whether the answer also has the text of each token."""
    model: str | None = None

    def chat(self) -> ChatBody:
        return ChatBody(
            messages=self.messages or [],
            tools=self.tools,
            tool_choice=self.tool_choice,
            reasoning_effort=self.reasoning_effort,
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=self.continue_final_message,
        )


class DetokenizeBody(msgspec.Struct):
    tokens: list[Any]
    skip_special_tokens: bool = True
    model: str | None = None


class TokenizationRoutes:
    def __init__(self, answering: Answering, bodies: BodyReader) -> None:
        self._answering = answering
        self._bodies = bodies
        self._chat = Chat(answering)

    def install(self, parent: Routes) -> None:
        routes = parent.tagged("native")
        for prefix in ("", "/v1"):
            routes.add(f"{prefix}/tokenize", self.tokenize, "POST", body=TokenizeBody)
            routes.add(f"{prefix}/detokenize", self.detokenize, "POST", body=DetokenizeBody)
        routes.add("/tokenizer_info", self.info, "GET", "HEAD")

    async def tokenize(self, request: Request) -> Response:
        return await self._bodies.read(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._bodies.read(request, self._detokenize)

    async def info(self, request: Request) -> Response:
        """The tokenizer's configuration and the chat template in use, in vLLM's format."""
        text = self._answering.text
        config = {key: _with_token_texts(value) for key, value in text.tokenizer.config.items()}
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        if text.chat_template is not None:
            config["chat_template"] = text.chat_template
        return json_response(config)

    async def _tokenize(self, raw: dict[str, Any]) -> Response:
        body, warnings = self._answering.parser.read(
            raw, TokenizeBody, route="/tokenize", unsupported=_UNSUPPORTED
        )
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Exactly one of 'prompt' or 'messages' must be provided.")
        lists = await self._prompts(body) if body.messages is None else [await self._turn(body)]
        tokens = [ids.tolist() for ids in lists]
        answer = {"tokens": tokens, "count": [len(ids) for ids in tokens]}
        if body.return_token_strs:
            text_of = self._answering.text.tokenizer.token_text
            answer["token_strs"] = [[text_of(token_id) for token_id in ids] for ids in tokens]
        if not isinstance(body.prompt, list):
            answer = {key: value[0] for key, value in answer.items()}
        max_model_len = self._answering.config.max_model_len
        return json_response(
            {**answer, "max_model_len": max_model_len, **_warnings_field(warnings)}
        )

    async def _prompts(self, body: TokenizeBody) -> list[Ids]:
        texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
        if len(texts) > MAX_SEQUENCES:
            raise RequestError(f"One request may have at most {MAX_SEQUENCES} prompts.")
        with_special = body.add_special_tokens is not False
        encode = self._answering.text.encode
        return [await encode(text, add_special_tokens=with_special) for text in texts]

    async def _turn(self, body: TokenizeBody) -> Ids:
        chat = body.chat()
        chat.check()
        request = msgspec.structs.replace(
            chat_request(chat, self._answering.config.sampling_defaults),
            add_generation_prompt=body.add_generation_prompt is not False,
        )
        text = await self._chat.prompt_text(request)
        with_special = bool(body.add_special_tokens)
        return await self._answering.text.encode(text, add_special_tokens=with_special)

    async def _detokenize(self, raw: dict[str, Any]) -> Response:
        body, warnings = self._answering.parser.read(raw, DetokenizeBody, route="/detokenize")
        lists, is_batch = as_id_lists(body.tokens, "tokens")
        texts = []
        for ids in lists:
            self._answering.intake.check_ids(ids, name="tokens")
            texts.append(
                await self._answering.text.decode(ids, skip_special_tokens=body.skip_special_tokens)
            )
        return json_response({"text": texts if is_batch else texts[0], **_warnings_field(warnings)})


def _with_token_texts(value: Any) -> Any:
    """A value of tokenizer_config.json in which the text of each token replaces the token's
    object."""
    if isinstance(value, list):
        return [_with_token_texts(item) for item in value]
    if isinstance(value, dict):
        if isinstance(value.get("content"), str):
            return value["content"]
        return {key: _with_token_texts(item) for key, item in value.items()}
    return value


def _warnings_field(warnings: list[str]) -> dict[str, Any]:
    """The field with the warnings about a body, for an answer without ``meta_info``."""
    return {"warnings": warnings} if warnings else {}
