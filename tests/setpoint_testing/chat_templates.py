"""Chat templates in the manner of the model families, in our own words, and conversations to render
with them.

They use the features of the families' real templates: default system prompts, tools as JSON, tool
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

FUNCTIONS = """\
{{- bos_token ~ strftime_now('%Y')[:2] }}
{%- macro described(function, level=2) -%}
{{ function | tojson(true) }}{{ function | tojson(ensure_ascii=False, indent=level) }}
{{- function.parameters | tojson(separators=(',', ':'), sort_keys=true) }}{{ function.name | tojson }}
{%- endmacro %}
{%- for tool in tools or [] %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {{- '\\n' ~ described(tool.function) }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ message.content | upper }}{% continue %}{% endif %}
    {{- '\\n<' + message.role + '>' }}
    {%- generation %}{{- message.content }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {{- '[' + call.id + ' ' + call.function.name }}
        {%- for name, value in call.function.arguments.items() %}
            {{- ' ' + name + '=' + (value if value is string else value | tojson(ensure_ascii=False)) }}
        {%- endfor %}
        {{- ']' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n<assistant>' }}{% endif %}
"""
"""Loop control, macros, every parameter of tojson, arguments as objects."""

ARGUMENTS_AS_TEXT = """\
{%- if tools %}{{ tools | map(attribute='function') | list | tojson }}{% endif %}
{%- for message in messages %}
{{- '<' + message['role'] + '>' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}
{{- '>>' + call['function']['name'] + '\\n' + call['function']['arguments'] }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
"""
"""Joins the arguments of a call to text, so they must be text."""

ARGUMENTS_AS_THEY_ARE = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments }}){% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""
"""Writes the arguments of a call as they are, which is JSON only if they are text."""

PARTS = """\
{%- macro told(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for part in content %}{%- if part.type == 'text' %}{{- part.text }}|{% endif %}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{{- '<' + message.role + '>' }}
{%- if message.role == 'tool' %}{{- message.content | tojson }}
{%- else %}{{- told(message.content) }}{{ message.tool_calls | tojson if message.tool_calls }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
"""
"""Reads the parts of a message, but not those of a result."""

THINKING = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.role == 'assistant' %}
    {%- if message.thinking %}{{ '(' + message.thinking + ')' }}{% endif %}
    {{- '<think>' + (message.reasoning_content or '') + '</think>' + message.content.split('</think>')[-1] | trim + eos_token }}
{%- else %}{{- message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}
"""
"""Opens the reasoning for a new answer, and writes an earlier one behind its reasoning."""

TEMPLATES = {
    "chatml": CHATML,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "phi3": PHI3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
}

CONSTRUCTS = {
    "functions": FUNCTIONS,
    "arguments as text": ARGUMENTS_AS_TEXT,
    "arguments as they are": ARGUMENTS_AS_THEY_ARE,
    "parts": PARTS,
    "thinking": THINKING,
}
"""Further features of published templates."""

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
