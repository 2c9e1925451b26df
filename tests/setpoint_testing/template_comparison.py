"""Renders conversations with a chat template as transformers does and as the frontend does, and
compares the two texts character by character."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from setpoint.core.errors import CheckpointError, RequestError
from setpoint.core.request import RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.chat.chat_request import ChatRequest, Tool
from setpoint.frontend.chat.prompt import chat_prompt
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.template import ChatTemplate
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint_testing.byte_tokenizer import make_byte_tokenizer

SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}

Verdict = Literal[
    "equal", "described", "unread", "both refuse", "only here", "refused here", "different"
]
"""The outcome of a comparison. described: the template ignores tools or calls, so the frontend
writes them into the messages. unread: the template cannot read text in parts, so transformers loses
the text or writes the parts as data. The last two outcomes are faults."""
FAULTS: tuple[Verdict, ...] = ("refused here", "different")

_SYSTEM = {"role": "system", "content": 'Be brief. "Quote" <b>&</b> 简短'}
_ASK = {"role": "user", "content": "Weather in Zürich & Köln?\n"}
_ANSWER = {"role": "assistant", "content": "Rain in Zürich."}
_PARAMETERS = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "A city's <name>, e.g. Zürich"},
        "days": {"type": "integer", "enum": [1, 3]},
    },
    "required": ["place"],
}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_DESCRIPTION = "The weather at a place & its neighbours"
_TOOLS = (Tool("weather", _DESCRIPTION, _PARAMETERS), Tool("time", "The time.", _NO_PARAMETERS))
_ARGUMENTS = {"place": 'Zürich "Altstadt" <1>', "days": 3, "near": {"all": True, "at": [1.5, None]}}


def _call(number: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    # The id has nine letters and digits, which Mistral's templates insist on.
    function = {"name": name, "arguments": dict(arguments)}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def _called(content: str, *calls: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def _result(number: int, name: str, content: Any) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": f"call{number:05}",
        "name": name,
        "content": content,
    }


_ONE_CALL = _called("", _call(1, "weather", _ARGUMENTS))
_TWO_CALLS = _called("I look.", _call(1, "weather", _ARGUMENTS), _call(2, "time", {}))


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@dataclass(frozen=True)
class Case:
    """A conversation, and the other arguments of the template."""

    name: str
    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    """Whether the last message is to be continued."""

    @property
    def parts(self) -> list[str]:
        """The texts that are given in parts, as templates may trim them."""
        lists = [each["content"] for each in self.messages if isinstance(each["content"], list)]
        return [part["text"].strip() for parts in lists for part in parts]


CASES = (
    Case("plain", [_ASK]),
    Case("system", [_SYSTEM, _ASK]),
    Case("turns", [_SYSTEM, _ASK, _ANSWER, {"role": "user", "content": "And tomorrow?"}]),
    Case("tools", [_ASK], _TOOLS),
    Case("system and tools", [_SYSTEM, _ASK], _TOOLS),
    Case("call", [_ASK, _ONE_CALL, _result(1, "weather", '{"sky": "grey"}')], _TOOLS),
    Case(
        "two calls",
        [_SYSTEM, _ASK, _TWO_CALLS, _result(1, "weather", "grey"), _result(2, "time", "9")],
        _TOOLS,
    ),
    Case(
        "after a call",
        [_ASK, _ONE_CALL, _result(1, "weather", "grey"), _ANSWER, _ASK],
        _TOOLS,
    ),
    Case(
        "call without text",
        [_ASK, {**_ONE_CALL, "content": None}, _result(1, "weather", "grey")],
        _TOOLS,
    ),
    Case(
        "reasoning",
        [_ASK, {**_ANSWER, "reasoning_content": "Hm, Zürich.\nGrey."}, _ASK],
    ),
    Case(
        "reasoning and call",
        [_ASK, {**_ONE_CALL, "reasoning_content": "I look."}, _result(1, "weather", "grey")],
        _TOOLS,
    ),
    Case("thinking on", [_ASK], variables={"enable_thinking": True, "thinking": True}),
    Case("thinking off", [_ASK], variables={"enable_thinking": False, "thinking": False}),
    Case("parts", [{"role": "user", "content": _parts("One.", " Two?")}]),
    Case(
        "parts in all roles",
        [
            {"role": "system", "content": _parts("Be brief.")},
            {"role": "user", "content": _parts("One?")},
            {"role": "assistant", "content": _parts("Two.")},
            {"role": "user", "content": _parts("Three?")},
        ],
    ),
    Case(
        "result in parts",
        [_ASK, _ONE_CALL, _result(1, "weather", _parts("grey"))],
        _TOOLS,
    ),
    Case("continued", [_ASK, {"role": "assistant", "content": "It is"}], continued=True),
    Case(
        "continued after turns",
        [_SYSTEM, _ASK, _ANSWER, _ASK, {"role": "assistant", "content": "Dry, but"}],
        continued=True,
    ),
)


@dataclass(frozen=True)
class Outcome:
    case: Case
    verdict: Verdict
    theirs: str
    """The text that transformers renders, or the reason why it renders none."""
    ours: str


def compare(source: str, cases: Sequence[Case] = CASES) -> list[Outcome]:
    """The outcome of every case with a template."""
    try:
        template: ChatTemplate | str = ChatTemplate(source, special_tokens=SPECIAL_TOKENS)
    except CheckpointError as error:
        template = str(error)
    return [_compare(source, template, case) for case in cases]


def _compare(source: str, template: ChatTemplate | str, case: Case) -> Outcome:
    theirs, is_theirs = _by_transformers(source, case)
    try:
        if isinstance(template, str):
            raise RequestError(template)
        ours, is_described = _by_us(template, case)
    except RequestError as error:
        return Outcome(case, "refused here" if is_theirs else "both refuse", theirs, str(error))
    if not is_theirs:
        return Outcome(case, "only here", theirs, ours)
    if ours == theirs:
        return Outcome(case, "equal", theirs, ours)
    if is_described:
        return Outcome(case, "described", theirs, ours)
    is_read = all(text in theirs for text in case.parts) and not _AS_DATA.search(theirs)
    return Outcome(case, "different" if is_read else "unread", theirs, ours)


_AS_DATA = re.compile(r"""['"]text['"]\s*:\s*['"](?:One|Two|grey|Be)""")
"""A part of the cases, written as JSON or as Python does."""


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=make_byte_tokenizer(), **SPECIAL_TOKENS)


def _by_transformers(source: str, case: Case) -> tuple[str, bool]:
    """The text that transformers renders and True, or its error and False. Arguments of calls are
    objects, as in the library's documentation, or JSON text if the template cannot read objects."""
    first, is_text = _render(source, case, case.messages)
    as_text = [_with_arguments_as_text(message) for message in case.messages]
    if as_text == list(case.messages) or (is_text and "{'place': 'Z" not in first):
        return first, is_text
    second, is_second = _render(source, case, as_text)
    return (second, True) if is_second else (first, is_text)


def _render(source: str, case: Case, messages: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    try:
        text = _tokenizer().apply_chat_template(
            json.loads(json.dumps(messages)),
            chat_template=source,
            tools=_as_sent(case.tools),
            tokenize=False,
            add_generation_prompt=not case.continued,
            continue_final_message=case.continued,
            **case.variables,
        )
    except Exception as error:  # a template may raise anything
        return f"{type(error).__name__}: {error}", False
    return str(text), True


def _as_sent(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
            },
        }
        for tool in tools
    ] or None


def _with_arguments_as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _by_us(template: ChatTemplate, case: Case) -> tuple[str, bool]:
    """The prompt, and whether the frontend described the tools or calls in the messages."""
    text = TextProcessor(Tokenizer(make_byte_tokenizer()), template)
    request = ChatRequest(
        messages=case.messages,
        sampling=SamplingParams(),
        options=RequestOptions(),
        tools=case.tools,
        variables=case.variables,
        continue_final_message=case.continued,
    )
    prompt = asyncio.run(chat_prompt(request, text, {}))
    is_called = any(message.get("tool_calls") for message in case.messages)
    is_described = bool(case.tools or is_called) and not text.template_reads("tools")
    return prompt.rendered + prompt.started, is_described
