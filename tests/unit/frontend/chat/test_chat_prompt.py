"""From one turn of a conversation to the prompt: what is checked, and what the template is given."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from setpoint.core.errors import RequestError
from setpoint.core.request import RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.frontend.chat.chat_request import ChatRequest, Tool
from setpoint.frontend.chat.prompt import chat_prompt
from setpoint.frontend.text.processor import TextProcessor
from setpoint.frontend.text.template import ChatTemplate
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint_testing.byte_tokenizer import make_byte_tokenizer
from setpoint_testing.chat_templates import (
    ARGUMENTS_AS_TEXT,
    ARGUMENTS_AS_THEY_ARE,
    CHATML,
    FUNCTIONS,
    PARTS,
    QWEN2,
    QWEN3,
    TEMPLATES,
    THINKING,
)

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "Weather in Rome?"}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
WEATHER = Tool("weather", "The weather of a city.", {"type": "object"})


def turn(*messages: Any, **fields: Any) -> ChatRequest:
    return ChatRequest(
        messages=messages, sampling=SamplingParams(), options=RequestOptions(), **fields
    )


def prompt_of(template: str, request: ChatRequest, **defaults: Any) -> str:
    text = TextProcessor(
        Tokenizer(make_byte_tokenizer()), ChatTemplate(template, special_tokens=TOKENS)
    )
    prompt = asyncio.run(chat_prompt(request, text, defaults))
    return prompt.rendered + prompt.started


def test_a_template_is_given_tools_calls_and_results() -> None:
    prompt = prompt_of(QWEN2, turn(USER, CALLED, RESULT, tools=(WEATHER,)))
    assert (
        '<tools>\n{"type": "function", "function": {"name": "weather", "description": "The weather'
        ' of a city.", "parameters": {"type": "object"}}}\n</tools>' in prompt
    )
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in prompt, "an object, not a string"
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


def test_a_template_without_tools_is_told_in_messages() -> None:
    system = {"role": "system", "content": "Be kind."}
    prompt = prompt_of(CHATML, turn(system, USER, CALLED, RESULT, tools=(WEATHER,)))
    assert prompt.startswith("<|im_start|>system\nBe kind.\n\nYou can call functions.")
    assert '"name":"weather"' in prompt
    call = '<tool_call>\n{"name":"weather","arguments":{"city":"Rome"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>" in prompt


def test_tools_of_a_message_are_not_the_tools_of_a_turn() -> None:
    template = (
        "{% for message in messages %}{% if 'tools' in message %}{{ message['tools'] }}{% endif %}"
        "<{{ message.role }}>{{ message.content }}{% endfor %}"
    )
    prompt = prompt_of(template, turn(USER, tools=(WEATHER,)))
    assert "You can call functions." in prompt
    assert '"name":"weather"' in prompt


def test_without_a_system_message_the_first_question_tells_of_the_tools() -> None:
    prompt = prompt_of(CHATML, turn(USER, CALLED, RESULT, tools=(WEATHER,)))
    assert prompt.count("You can call functions.") == 1
    assert "<|im_start|>user\nYou can call functions." in prompt
    assert "response>.\n\nWeather in Rome?<|im_end|>" in prompt


@pytest.mark.parametrize("family", TEMPLATES)
def test_every_family_is_told_of_tools_calls_and_results(family: str) -> None:
    two = {**CALLED, "tool_calls": [CALL, {**CALL, "id": "call_2"}]}
    other = {"role": "tool", "tool_call_id": "call_2", "content": "windy"}
    conversation = (USER, two, RESULT, other, {"role": "assistant", "content": "Fine."}, USER)
    prompt = prompt_of(TEMPLATES[family], turn(*conversation, tools=(WEATHER,)))
    parts = ["The weather of a city.", '"Rome"', '"Rome"', "sunny", "windy", "Fine.", "in Rome?"]
    at = 0
    for part in parts:
        at = prompt.index(part, at) + 1


@pytest.mark.parametrize("template", [CHATML, QWEN2])
def test_tools_that_must_not_be_called_are_not_shown(template: str) -> None:
    request = turn(USER, tools=(WEATHER,), tool_choice="none")
    assert prompt_of(template, request) == prompt_of(template, turn(USER))


def test_only_a_named_tool_is_shown() -> None:
    tools = (WEATHER, Tool("time"))
    named = turn(USER, tools=tools, tool_choice="required", named_tool="time")
    assert '"time"' in prompt_of(QWEN2, named)
    assert '"weather"' not in prompt_of(QWEN2, named)
    allowed = turn(USER, tools=tools, allowed_tools=("time",))
    assert '"weather"' in prompt_of(QWEN2, allowed), "the prompt stays as it is"


def test_a_developer_is_the_system_where_the_template_does_not_know_one() -> None:
    prompt = prompt_of(CHATML, turn({"role": "developer", "content": "Be kind."}, USER))
    assert prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>")
    known = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{% endfor %}"
    assert prompt_of(known, turn({"role": "developer", "content": "x"}, USER)) == "D"


def test_thinking_is_a_variable_of_the_template() -> None:
    template = "{{ enable_thinking is defined }} {{ enable_thinking }} {{ thinking }}"
    assert prompt_of(template, turn(USER)) == "False  "
    assert prompt_of(template, turn(USER, thinking=False)) == "True False False"
    assert prompt_of(template, turn(USER), enable_thinking=1) == "True 1 "
    assert prompt_of(template, turn(USER, thinking=True), enable_thinking=1) == "True True True"
    said = turn(USER, thinking=False, variables={"thinking": True})
    assert prompt_of(template, said) == "True False True", "what the client says itself counts"


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city": '}}
    broken = {"role": "assistant", "tool_calls": [call]}
    template = "{{ messages[1].tool_calls[0].function.arguments }}"
    assert prompt_of(template, turn(USER, broken)) == '{"city": '


def test_a_template_that_reads_objects_only_is_given_broken_arguments_as_one() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city": '}}
    broken = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = prompt_of(FUNCTIONS, turn(USER, broken, {**RESULT, "tool_call_id": "a"}))
    assert '[a f arguments={"city": ]' in prompt


def test_a_template_that_reads_text_only_is_given_arguments_as_text() -> None:
    for template in (ARGUMENTS_AS_TEXT, ARGUMENTS_AS_THEY_ARE):
        prompt = prompt_of(template, turn(USER, CALLED, RESULT, tools=(WEATHER,)))
        assert "weather" in prompt
        assert '{"city": "Rome"}' in prompt
        broken = {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}
        assert "{" in prompt_of(template, turn(USER, broken, RESULT))


def test_text_in_parts_is_joined_where_the_template_does_not_read_parts() -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "refusal", "refusal": "Two."}]
    told = turn({"role": "user", "content": parts}, CALLED, {**RESULT, "content": parts})
    prompt = prompt_of(PARTS, told)
    assert "<user>One.|Two.|<assistant>" in prompt
    assert '<tool>"One. Two."<assistant>' in prompt, "results are not read in parts"
    assert "<|im_start|>user\nOne. Two.<|im_end|>" in prompt_of(QWEN2, told)
    described = prompt_of(CHATML, turn({"role": "user", "content": parts}, tools=(WEATHER,)))
    assert described.endswith("\n\nOne. Two.<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_of_earlier_turns_has_any_of_three_names(key: str) -> None:
    before = {"role": "assistant", "content": "4", key: "2 and 2"}
    template = "{{ messages[1].reasoning_content }} {{ messages[1].thinking }}"
    assert prompt_of(template, turn(USER, before, USER)) == "2 and 2 2 and 2"


@pytest.mark.parametrize("nothing", [None, []])
def test_keys_of_an_answer_that_hold_nothing_do_not_reach_the_template(nothing: Any) -> None:
    before = {"role": "assistant", "content": "4", "tool_calls": nothing, "refusal": None}
    template = "{{ 'tool_calls' in messages[1] }} {{ 'refusal' in messages[1] }}"
    assert prompt_of(template, turn(USER, before, USER)) == "False False"


def test_reasoning_of_earlier_turns_reaches_the_template() -> None:
    before = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    template = "{{ messages[1].reasoning_content }}"
    assert prompt_of(template, turn(USER, before, USER)) == "2 and 2"


def test_the_last_message_is_continued() -> None:
    started = {"role": "assistant", "content": "It is "}
    prompt = prompt_of(CHATML, turn(USER, started, continue_final_message=True))
    assert prompt.endswith("<|im_start|>assistant\nIt is ")
    assert prompt_of(QWEN3, turn(USER, continue_final_message=True)).endswith("assistant\n")


def test_a_message_is_continued_as_an_earlier_answer_is_shown() -> None:
    """Not behind the reasoning that the template opens for a new answer."""
    assert prompt_of(THINKING, turn(USER)).endswith("<|assistant|><think>\n")
    started = {"role": "assistant", "content": " It is ", "reasoning_content": "Hm."}
    request = turn(USER, started, continue_final_message=True)
    assert prompt_of(THINKING, request).endswith("<|assistant|>(Hm.)<think>Hm.</think>It is")


def test_a_message_that_the_template_cannot_show_follows_the_prompt() -> None:
    refusing = "{{ raise_exception('no') if messages[-1].role == 'assistant' }}Q{{ messages[0].content }}A:"
    losing = "{{ messages[0].content }}A:"
    started = {"role": "assistant", "content": "It is "}
    for template in (refusing, losing):
        prompt = prompt_of(template, turn(USER, started, continue_final_message=True))
        assert prompt.endswith("Rome?A:It is ")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must not be empty"),
        ([{"role": "system", "content": "x"}], "at least one user message"),
        ([{"role": "assistant", "content": "x"}], "at least one user message"),
        ([5], r"messages\[0\] must be an object"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": []}], r"messages\[0\].content must not be an empty list"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a string or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "text parts only, got 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": []}]}], "text parts only, got an object"),
        ([{"role": "user", "content": [5]}], "text parts only, got a whole number"),
        (
            [USER, {"role": "assistant", "tool_calls": 5}],
            r"messages\[1\].tool_calls must be a list",
        ),
        ([USER, {"role": "assistant", "tool_calls": [5]}], r"tool_calls\[0\] must be an object"),
        ([USER, RESULT], r"messages\[1\] is the result of a tool, but no earlier message"),
        ([USER, {"role": "tool", "content": "x"}], "the result of a tool, but no earlier message"),
        ([USER, CALLED, {**RESULT, "tool_call_id": "call_2"}], r"messages\[2\].tool_call_id is"),
        ([USER, CALLED, {**RESULT, "tool_call_id": 5}], "tool_call_id must be a string"),
        ([USER, CALLED, {**RESULT, "content": None}], r"messages\[2\].content is missing"),
    ],
)
def test_wrong_messages_are_refused_by_name(messages: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prompt_of(CHATML, turn(*messages))


def test_a_result_without_an_id_belongs_to_the_calls_before() -> None:
    prompt_of(CHATML, turn(USER, CALLED, {"role": "tool", "content": "sunny"}))


def test_a_message_that_called_a_tool_cannot_be_continued() -> None:
    with pytest.raises(RequestError, match="continue_final_message"):
        prompt_of(CHATML, turn(USER, CALLED, continue_final_message=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": (WEATHER, WEATHER)}, r"tools\[1\]: two tools have the name 'weather'"),
        ({"tools": (Tool("a b"),)}, r"tools\[0\]: the name 'a b' must have"),
        ({"tools": (Tool(""),)}, r"tools\[0\]: the name '' must have"),
        ({"tools": (Tool("x" * 129),)}, "must have 1 to 128"),
        ({"tool_choice": "required"}, "but tools is empty"),
        ({"tools": (WEATHER,), "named_tool": "time"}, "Tool 'time' not found in tools list"),
        ({"tools": (WEATHER,), "allowed_tools": ("time",)}, "Tool 'time' not found"),
    ],
)
def test_wrong_tools_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prompt_of(CHATML, turn(USER, **fields))
