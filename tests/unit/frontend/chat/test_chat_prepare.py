"""What one turn of a conversation asks of the engine: its prompt, its constraint, where that
begins, and how the answer is parsed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken

from setpoint.core.errors import RequestError
from setpoint.core.messages import Finish, TokenEvent
from setpoint.core.request import RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.chat.chat_request import ChatRequest, Tool
from setpoint.frontend.chat.deltas import join_deltas
from setpoint.frontend.chat.formats.format_registry import REASONING_FORMATS
from setpoint.frontend.chat.parser import joining_reasoning, parse_answer
from setpoint.frontend.chat.turn.prepare import Chat, PreparedChat
from setpoint.frontend.composition import compose
from setpoint.frontend.config import FrontendConfig
from setpoint.frontend.jobs import SequenceOutput
from setpoint.frontend.service import Service
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.template import ChatTemplate
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.ipc.client import EngineClient
from setpoint_testing.byte_tokenizer import make_byte_tokenizer
from setpoint_testing.chat_templates import CHATML, QWEN2, QWEN3
from setpoint_testing.fake_engine import FixedOptions

HI = ({"role": "user", "content": "hi"},)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("weather", parameters=SCHEMA)
TIME = Tool("time")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def tokenizer_of(*markers: str, special: Sequence[str] = ()) -> Tokenizer:
    """The byte tokenizer, with markers that are one token each."""
    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(marker, normalized=False) for marker in special])
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    return Tokenizer(tokenizer)


PLAIN, WITH_MARKERS = tokenizer_of(), tokenizer_of("<think>", "</think>")
CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
WITH_CHANNELS = tokenizer_of("final", special=CHANNELS)
HARMONY = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}"
    "<|end|>{% endfor %}<|start|>assistant"
)


def service_of(template: str, tokenizer: Tokenizer, **options: Any) -> Service:
    config = FrontendConfig(
        model_path="m", served_model_name="m", tokenizer_path="m", context_len=8192,
        max_req_input_len=8000, vocab_size=300, **options,
    )  # fmt: skip
    text = TextProcessor(tokenizer, ChatTemplate(template))
    return compose(config, EngineClient(), text, FixedOptions())


def prepared(
    template: str = QWEN2,
    *,
    tokenizer: Tokenizer = PLAIN,
    sampling: dict[str, Any] | None = None,
    tool_call_parser: str = "hermes",
    reasoning_parser: str = "none",
    **fields: Any,
) -> PreparedChat:
    service = service_of(
        template, tokenizer, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser
    )
    turn = ChatRequest(
        messages=HI,
        sampling=SamplingParams.parse(sampling or {}),
        options=RequestOptions(),
        **fields,
    )
    return asyncio.run(Chat(service.answering).prepare(turn, rid="r"))


def constraint_of(chat: PreparedChat) -> Any:
    constraint = chat.requests[0].sampling.constraint
    if constraint is None:
        return None
    return (
        json.loads(constraint.text)["format"] if constraint.kind == "structural_tag" else constraint
    )


def prompt_of(chat: PreparedChat, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(chat.requests[0].prompt().tolist(), skip_special_tokens=False)


def said(chat: PreparedChat, text: str) -> Any:
    answer = join_deltas(parse_answer(chat.make_parser(), text))
    return answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]


def test_without_tools_everything_is_text() -> None:
    chat = prepared()
    assert constraint_of(chat) is None
    assert said(chat, CALL) == (CALL, "", [])


def test_tools_are_free_to_be_called() -> None:
    chat = prepared(tools=(WEATHER,))
    assert constraint_of(chat) is None
    assert said(chat, CALL) == ("", "", [("weather", '{"city": "Rome"}')])
    assert not chat.requests[0].sampling.skip_special_tokens, "the markers may be special tokens"
    assert not chat.warnings


def test_tools_that_must_not_be_called_are_not_looked_for() -> None:
    chat = prepared(tools=(WEATHER,), tool_choice="none")
    assert said(chat, CALL) == (CALL, "", [])
    assert chat.requests[0].sampling.skip_special_tokens


@pytest.mark.parametrize(
    ("fields", "names", "stop"),
    [
        ({"tool_choice": "required"}, ["weather", "time"], False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "time"], True),
        ({"tool_choice": "required", "named_tool": "time"}, ["time"], True),
        ({"tool_choice": "required", "allowed_tools": ("time",)}, ["time"], False),
    ],
)
def test_calls_that_must_be_made_are_the_whole_answer(
    fields: dict[str, Any], names: list[str], stop: bool
) -> None:
    chat = prepared(tools=(WEATHER, TIME), **fields)
    form = constraint_of(chat)
    assert form["type"] == "tags_with_separator"
    assert (form["at_least_one"], form["stop_after_first"]) == (True, stop)
    assert [name for tag in form["tags"] for name in ("weather", "time") if name in tag["begin"]] == names  # fmt: skip
    if "weather" in names:
        assert form["tags"][0]["content"]["json_schema"] == SCHEMA


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": (Tool("weather", parameters=SCHEMA, strict=True),)},
        {"tools": (WEATHER,), "parallel_tool_calls": False},
        {"tools": (WEATHER, TIME), "allowed_tools": ("weather",)},
    ],
)
def test_what_binds_free_calls_is_a_constraint_on_calls_alone(fields: dict[str, Any]) -> None:
    form = constraint_of(prepared(**fields))
    assert form["type"] == "triggered_tags"
    assert [tag["begin"].count("weather") for tag in form["tags"]] == [1]
    with pytest.raises(RequestError, match="need tool_choice required"):
        prepared(tool_call_parser="none", **fields)


def test_without_a_known_format_required_calls_are_an_array() -> None:
    chat = prepared(tool_call_parser="none", tools=(WEATHER,), tool_choice="required")
    assert constraint_of(chat)["json_schema"]["type"] == "array"
    answer = '[{"name": "weather", "parameters": {"city": "Rome"}}]'
    assert said(chat, answer) == ("", "", [("weather", '{"city": "Rome"}')])


def test_without_a_known_format_calls_stay_in_the_text_and_the_client_is_told() -> None:
    chat = prepared(tool_call_parser="none", tools=(WEATHER,))
    assert said(chat, CALL) == (CALL, "", [])
    assert "stay in the text" in chat.warnings[0]


def test_a_template_without_tools_is_answered_in_the_format_that_the_prompt_asks_for() -> None:
    chat = prepared(CHATML, tool_call_parser="none", tools=(WEATHER,))
    assert "write its name and its arguments as JSON between two tags" in prompt_of(chat, PLAIN)
    assert said(chat, CALL) == ("", "", [("weather", '{"city": "Rome"}')])


@pytest.mark.parametrize(
    ("sampling", "part"),
    [
        ({"json_schema": SCHEMA}, {"type": "json_schema", "json_schema": SCHEMA}),
        ({"regex": "a+"}, {"type": "regex", "pattern": "a+"}),
        ({"ebnf": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
    ],
)
def test_a_constrained_text_and_calls_are_alternatives(
    sampling: dict[str, Any], part: dict[str, Any]
) -> None:
    form = constraint_of(prepared(sampling=sampling, tools=(WEATHER,)))
    assert form["type"] == "or"
    assert form["elements"][0] == part
    assert form["elements"][1]["type"] == "tags_with_separator"
    forced = prepared(sampling=sampling, tools=(WEATHER,), tool_choice="required")
    assert constraint_of(forced)["type"] == "tags_with_separator"
    unasked = prepared(sampling=sampling, tools=(WEATHER,), tool_choice="none")
    assert constraint_of(unasked).kind == next(iter(sampling))


def test_a_clients_own_tag_says_everything_itself() -> None:
    own = {"type": "structural_tag", "format": {"type": "any_text"}}
    chat = prepared(sampling={"structural_tag": own}, tools=(WEATHER,))
    assert constraint_of(chat) == {"type": "any_text"}


def test_reasoning_is_taken_out_of_the_text() -> None:
    chat = prepared(QWEN3, reasoning_parser="qwen3", tools=(WEATHER,))
    assert said(chat, f"<think>hm</think>\n\n{CALL}") == (
        "",
        "hm",
        [("weather", '{"city": "Rome"}')],
    )
    together = prepared(QWEN3, reasoning_parser="qwen3", separate_reasoning=False)
    assert said(together, "<think>hm</think>yes") == ("<think>hm</think>yes", "", [])


def test_a_constraint_begins_behind_the_reasoning() -> None:
    end = WITH_MARKERS.encode("</think>").tolist()
    how: dict[str, Any] = {"tokenizer": WITH_MARKERS, "reasoning_parser": "qwen3"}
    free = prepared(QWEN3, **how)
    assert free.requests[0].options.constrain_after == ()
    assert prompt_of(free, WITH_MARKERS).endswith("assistant\n")
    chat = prepared(QWEN3, sampling={"json_schema": SCHEMA}, **how)
    assert chat.requests[0].options.constrain_after == tuple(end)
    assert prompt_of(chat, WITH_MARKERS).endswith("assistant\n<think>\n"), "or it might not reason"
    assert said(chat, 'hm</think>{"city": "Rome"}') == ('{"city": "Rome"}', "hm", [])


def test_with_channels_a_constraint_begins_in_the_last_one() -> None:
    """No analysis is forced on the model: an answer without one has the channel final, too."""
    how: dict[str, Any] = {"tokenizer": WITH_CHANNELS, "reasoning_parser": "gpt-oss"}
    end = WITH_CHANNELS.encode("<|channel|>final<|message|>").tolist()
    assert prepared(HARMONY, **how).requests[0].options.constrain_after == ()
    chat = prepared(HARMONY, sampling={"json_schema": SCHEMA}, **how)
    assert chat.requests[0].options.constrain_after == tuple(end)
    assert prompt_of(chat, WITH_CHANNELS).endswith("<|start|>assistant")
    answer = '<|channel|>final<|message|>{"city": "Rome"}'
    assert said(chat, answer) == ('{"city": "Rome"}', "", [])
    analysed = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{answer}"
    assert said(chat, analysed) == ('{"city": "Rome"}', "hm", [])


def test_where_the_last_channel_is_open_a_constraint_holds_from_the_start() -> None:
    chat = prepared(
        HARMONY + "<|channel|>final<|message|>",
        tokenizer=WITH_CHANNELS,
        reasoning_parser="gpt-oss",
        sampling={"json_schema": SCHEMA},
    )
    assert chat.requests[0].options.constrain_after == ()


def test_without_reasoning_a_constraint_holds_from_the_start() -> None:
    how: dict[str, Any] = {"tokenizer": WITH_MARKERS, "sampling": {"json_schema": SCHEMA}}
    for chat in (
        prepared(QWEN3, reasoning_parser="qwen3", thinking=False, **how),
        prepared(QWEN2, reasoning_parser="qwen3", **how),
        prepared(QWEN3, reasoning_parser="none", **how),
    ):
        assert chat.requests[0].options.constrain_after == ()
        assert not prompt_of(chat, WITH_MARKERS).endswith("<think>\n")


def test_a_client_is_told_of_reasoning_that_cannot_be_turned_off() -> None:
    for parser, warnings in (
        ("deepseek-r1", ["This model's reasoning cannot be turned off."]),
        ("none", []),
    ):
        chat = prepared(QWEN2, reasoning_parser=parser, thinking=False)
        assert chat.warnings == warnings
    assert prepared(QWEN3, reasoning_parser="qwen3", thinking=False).warnings == []


def test_a_constraint_needs_a_certain_end_of_the_reasoning() -> None:
    with pytest.raises(RequestError, match="can write '</think>' in different tokens"):
        prepared(QWEN3, reasoning_parser="qwen3", sampling={"regex": "a"})
    for tokenizer in (PLAIN, tokenizer_of(special=CHANNELS)):
        how: dict[str, Any] = {"tokenizer": tokenizer, "reasoning_parser": "gpt-oss"}
        with pytest.raises(RequestError, match="A constraint cannot begin after the reasoning"):
            prepared(HARMONY, sampling={"regex": "a"}, **how)


@pytest.mark.parametrize("tokenizer", [PLAIN, WITH_MARKERS])
@pytest.mark.parametrize(
    ("parser", "text", "reasoning"),
    [
        ("qwen3", "<think>hm</think>yes", "<think>hm</think>"),
        ("qwen3", "<think>hm", "<think>hm"),
        ("qwen3", "yes", ""),
        ("deepseek-r1", "hm</think>yes</think>", "hm</think>"),
        ("none", "<think>hm</think>yes", ""),
        ("qwen3", f"<think>hm\n{CALL}", "<think>hm\n"),
        ("deepseek-r1", f"hm\n{CALL}", "hm\n"),
        ("qwen3", f"<think>hm `{CALL}", f"<think>hm `{CALL}"),
    ],
)
def test_reasoning_tokens_are_counted(
    tokenizer: Tokenizer, parser: str, text: str, reasoning: str
) -> None:
    chat = prepared(QWEN3, tokenizer=tokenizer, reasoning_parser=parser)
    output = SequenceOutput(chat.requests[0], 0, tokenizer)
    ids = tokenizer.encode(text).tolist()
    finish = Finish("length", length=len(ids))
    output.feed(TokenEvent(0, ids, num_prompt=1, num_outputs=len(ids), finish=finish))
    assert chat.reasoning_tokens(output) == len(tokenizer.encode(reasoning))


def test_text_like_a_marker_is_not_counted_as_reasoning() -> None:
    chat = prepared(QWEN3, tokenizer=WITH_MARKERS, reasoning_parser="qwen3")
    output = SequenceOutput(chat.requests[0], 0, WITH_MARKERS)
    ids = list(b"<think> is a tag")
    output.feed(TokenEvent(0, ids, num_prompt=1, num_outputs=len(ids)))
    assert chat.reasoning_tokens(output) == 0


def test_markers_that_are_special_tokens_are_shown_to_the_parser() -> None:
    """Red before for qwen3 and others: the text was without them, so all of it was the answer."""
    for tokenizer, skips in (
        (tokenizer_of(special=("<think>", "</think>")), False),
        (WITH_MARKERS, True),
    ):
        chat = prepared(QWEN3, tokenizer=tokenizer, reasoning_parser="qwen3")
        assert chat.requests[0].sampling.skip_special_tokens == skips
        assert chat.tokens == ("<think>", "</think>")


def test_reasoning_can_be_sent_in_one_piece() -> None:
    chat = prepared(QWEN3, reasoning_parser="qwen3")
    parser = joining_reasoning(chat.make_parser)()
    pieces = [
        join_deltas(parser.feed(piece)) for piece in ("<think>a", "b", "c</think>", "yes", "!")
    ]
    assert [(each.reasoning, each.text) for each in pieces] == [
        ("", ""), ("", ""), ("", ""), ("abc", "yes"), ("", "!"),
    ]  # fmt: skip
    unended = joining_reasoning(chat.make_parser)()
    assert join_deltas([*unended.feed("<think>ab"), *unended.end()]).reasoning == "ab"


SWITCHED = {
    "off unless it is turned on": (
        "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}",
        {None: False, True: True, False: False},
    ),
    "off unless it is turned on, in the system prompt": (
        "{% if enable_thinking %}Think!{% endif %}",
        {None: False, True: True, False: False},
    ),
    "on unless it is turned off": (
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
        {None: True, True: True, False: False},
    ),
    "on, with an opening, unless it is turned off": (
        "{% if enable_thinking is false %}<think></think>{% else %}<think>{% endif %}",
        {None: True, True: True, False: False},
    ),
    "off by the other variable": (
        "{{ '<think>' if thinking is defined and thinking else '</think>' }}",
        {None: False, True: True, False: False},
    ),
    "off by the other variable, without a marker": (
        "{% if thinking %}Think!{% endif %}",
        {None: False, True: True, False: False},
    ),
    "on, and cannot be turned off": (
        "{% if thinking is false %}{{ raise_exception('always') }}{% endif %}",
        {None: True, True: True},
    ),
    "no variable": ("", {None: False, True: False, False: False}),
}
FAMILIES = [name for name, form in REASONING_FORMATS.items() if "think>" in form.end]


@pytest.mark.cases(37)
@pytest.mark.parametrize("parser", FAMILIES)
@pytest.mark.parametrize("what", SWITCHED)
def test_a_constraint_waits_for_reasoning_that_the_prompt_asks_for(what: str, parser: str) -> None:
    """Red before: a variable that nobody had set was taken for on, and an answer to a schema began
    with a reasoning that never ended."""
    form = REASONING_FORMATS[parser]
    source, expected = SWITCHED[what]
    template = CHATML + source.replace("<think>", form.begin).replace("</think>", form.end)
    tokenizer = tokenizer_of(form.begin, form.end)
    for value, reasons in expected.items():
        variables = {} if value is None else dict.fromkeys(("enable_thinking", "thinking"), value)
        chat = prepared(
            template,
            tokenizer=tokenizer,
            reasoning_parser=parser,
            sampling={"json_schema": SCHEMA},
            variables=variables,
        )
        always = form.starts_inside() and form.end not in prompt_of(chat, tokenizer)
        waits = bool(chat.requests[0].options.constrain_after)
        assert waits == (reasons or always), (value, prompt_of(chat, tokenizer))
        assert form.begin in prompt_of(chat, tokenizer) or not reasons or always


def test_a_default_of_the_server_turns_the_reasoning_on() -> None:
    template = CHATML + SWITCHED["off unless it is turned on, in the system prompt"][0]
    for value in (True, False):
        service = service_of(
            template,
            WITH_MARKERS,
            reasoning_parser="qwen3",
            tool_call_parser="none",
            chat_template_kwargs={"enable_thinking": value},
        )
        turn = ChatRequest(
            messages=HI,
            sampling=SamplingParams.parse({"json_schema": SCHEMA}),
            options=RequestOptions(),
        )
        chat = asyncio.run(Chat(service.answering).prepare(turn, rid="r"))
        assert bool(chat.requests[0].options.constrain_after) == value
