"""Answers in every family's format, over HTTP to the official openai client: whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from answers import HI, says

from setpoint.frontend.chat.formats.format_registry import TOOL_FORMATS

Serve = Callable[..., None]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ message.content }}\n{% endfor %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("look", "ping")
]
LOOK = ("look", {"city": 'Zürich 👩‍🚀\n"東"'})
JSON = json.dumps(LOOK[1], ensure_ascii=False)
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
CHANNEL = "<|start|>assistant<|channel|>commentary to=functions.{}<|message|>{}<|call|>"
CITY = LOOK[1]["city"]
ANSWERS = {
    "deepseekv3": f"So.<｜tool▁calls▁begin｜>{V3.format('look', JSON)}\n{V3.format('ping', '{}')}"
    "<｜tool▁calls▁end｜>",
    "deepseekv31": f"So.<｜tool▁calls▁begin｜>{V31.format('look', JSON)}{V31.format('ping', '{}')}"
    "<｜tool▁calls▁end｜>",
    "deepseekv32": 'So.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter'
    f' name="city" string="true">{CITY}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="ping">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "functiongemma": f"So.<start_function_call>call:look{{city:<escape>{CITY}<escape>}}"
    "<end_function_call><start_function_call>call:ping{}<end_function_call>",
    "gemma4": f'So.<|tool_call>call:look{{city:<|"|>{CITY}<|"|>}}<tool_call|>'
    "<|tool_call>call:ping{}<tool_call|>",
    "glm45": f"So.\n<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n"
    "</tool_call>\n<tool_call>ping\n</tool_call>",
    "gpt-oss": f"<|channel|>final<|message|>So.{CHANNEL.format('look', JSON)}"
    f"{CHANNEL.format('ping', '{}')}",
    "hermes": f'So.\n<tool_call>\n{{"name": "look", "arguments": {JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    "hunyuan": f"So.\n<tool_calls>\n<tool_call>look<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>"
    f"{CITY}</arg_value>\n</tool_call>\n<tool_call>ping<tool_sep>\n</tool_call>\n</tool_calls>",
    "hunyuan_a13b": f'So.\n<tool_calls>[{{"name": "look", "arguments": {JSON}}},'
    ' {"name": "ping", "arguments": {}}]</tool_calls>',
    "kimi_k2": f"So.<|tool_calls_section_begin|>{KIMI.format('look:0', JSON)}"
    f"{KIMI.format('ping:1', '{}')}<|tool_calls_section_end|>",
    "lfm2": f"So.<|tool_call_start|>[look(city={CITY!r}), ping()]<|tool_call_end|>",
    "llama3": f'So.<|python_tag|>{{"name": "look", "parameters": {JSON}}};'
    ' {"name": "ping", "parameters": {}}',
    "minimax-m2": f'So.\n<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">{CITY}'
    '</parameter>\n</invoke>\n<invoke name="ping">\n</invoke>\n</minimax:tool_call>',
    "mistral": f"So.[TOOL_CALLS]look[ARGS]{JSON}[TOOL_CALLS]ping[ARGS]{{}}",
    "pythonic": f"So.\n[look(city={CITY!r}), ping()]",
    "qwen3_coder": f"So.\n<tool_call>\n<function=look>\n<parameter=city>\n{CITY}\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=ping>\n</function>\n</tool_call>",
    "step3": "So.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke"
    f' name="look"><steptml:parameter name="city">{CITY}</steptml:parameter></steptml:invoke>'
    '<｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="ping">'
    "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
}
V32 = ANSWERS["deepseekv32"]
ANSWERS["deepseekv4"] = V32.replace("function_calls", "tool_calls")
ANSWERS["deepseekv41"] = V32.replace("function_calls", "calls").replace("DSML｜", "DSML｜ ")


def test_every_format_is_here() -> None:
    assert {TOOL_FORMATS[name].name for name in ANSWERS} == {
        form.name for form in TOOL_FORMATS.values()
    }


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_whole_and_streamed(serve: Serve, name: str) -> None:
    async def scenario(server: Any) -> None:
        body = {"model": "m", "messages": HI, "tools": TOOLS}
        one = await server.openai.chat.completions.create(**body)
        async with server.openai.chat.completions.stream(**body) as stream:
            other = await stream.get_final_completion()
        for choice in (one.choices[0], other.choices[0]):
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "So."
            calls = choice.message.tool_calls
            assert [
                (call.function.name, json.loads(call.function.arguments)) for call in calls
            ] == [LOOK, ("ping", {})]
            assert len({call.id for call in calls}) == 2

    serve(
        scenario,
        says(ANSWERS[name], context_len=4096),
        chat_template=TEMPLATE,
        tool_call_parser=name,
    )


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\nYes."),
        ("deepseek-r1", "Hm.\n</think>\n\nYes."),
        ("gemma4", "<|channel>thought\nHm.\n<channel|>Yes."),
        ("mistral", "[THINK]Hm.[/THINK]Yes."),
        ("kimi", "◁think▷Hm.◁/think▷Yes."),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
            "Yes.<|return|>",
        ),
    ],
)
def test_reasoning_whole_and_streamed(serve: Serve, name: str, answer: str) -> None:
    async def scenario(server: Any) -> None:
        create = server.openai.chat.completions.create
        message = (await create(model="m", messages=HI)).choices[0].message
        assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")
        stream = await create(model="m", messages=HI, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "Yes."
        reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        assert "".join(reasoning) == "Hm."

    serve(scenario, says(answer, context_len=4096), chat_template=TEMPLATE, reasoning_parser=name)
