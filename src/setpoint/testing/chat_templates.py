"""Chat templates in the manner of the model families, in our own words, and conversations to render
with them.

They use what the families' real templates lean on: default system prompts, tools as JSON, tool
calls and answers, loops with namespaces, slices and string methods, thinking blocks, errors.
"""

from __future__ import annotations

from typing import Any

CHATML = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}{{ '<|im_start|>system\\nYou answer briefly.<|im_end|>\\n' }}{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

QWEN2 = """\
{%- set system = messages[0].content if messages[0].role == 'system' else 'You answer carefully.' %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- '\\n\\n# Functions\\n\\nYou may call these:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- set plain = message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {%- if plain or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

QWEN3 = """\
{%- set found = namespace(last_question=-1) %}
{%- for message in messages[::-1] %}
    {%- set at = (messages | length - 1) - loop.index0 %}
    {%- if found.last_question < 0 and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set found.last_question = at %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > found.last_question %}
            {%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

PHI3 = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] in ('user', 'assistant') %}{{'<|' + message['role'] + '|>
' + message['content'] + '<|end|>
'}}{% else %}{{ raise_exception('no role ' + message['role']) }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and model take turns') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}
{%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
{%- if message['role'] == 'user' %}
{{- '[INST] ' + (system + '\\n\\n' if loop.last and system is defined else '') + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}
{{- ' ' + message['content'] + eos_token }}
{%- else %}
{{- raise_exception('only user and assistant after the first message') }}
{%- endif %}
{%- endfor %}
"""

TEMPLATES = {
    "chatml": CHATML,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "phi3": PHI3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Today's weather at a place <b>&</b> its neighbours",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    }
]

CHATS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([{"role": "user", "content": "  What is 2 + 2?\n"}], {}),
    (
        [
            {"role": "system", "content": "Sei knapp. 简短。"},
            {"role": "user", "content": "Wer? 👩‍🚀 {{ not a template }}"},
        ],
        {},
    ),
    (
        [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo."},
            {"role": "user", "content": "Three?"},
            {"role": "assistant", "content": "<think>\nfour\n</think>\n\nFive."},
        ],
        {"enable_thinking": False},
    ),
    (
        [
            {"role": "user", "content": "Weather in Zürich?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "weather", "arguments": {"place": "Zürich"}}}],
            },
            {"role": "tool", "content": "rain"},
            {"role": "tool", "content": "wind"},
        ],
        {"tools": TOOLS},
    ),
]
"""(messages, further variables)."""
