"""Tools of ``/v1/responses`` besides functions: those that a client runs are called in the shape of
their own items, whole and streamed, and go back into the conversation; those that a provider runs
are left out with a warning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from answers import says

from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
ROOM = 8192
PARSERS = {"tool_call_parser": "qwen25"}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" /.+/'},
}
NAMESPACE: Any = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}}],
}
LOCAL_SHELL: Any = {"type": "local_shell"}
SHELL: Any = {"type": "shell", "environment": {"type": "local"}}
INPUT = '*** Begin\n+"Zürich" \\ 🙂\n'


def called(name: str, arguments: Any) -> str:
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.fixture
def client(http_url: Callable[..., str]) -> Iterator[Callable[[str], openai.OpenAI]]:
    """``client(text)``: the official client of a server whose model answers with ``text``."""
    with ExitStack() as stack:

        def connect(text: str) -> openai.OpenAI:
            url = f"{http_url(says(text, context_len=ROOM), **PARSERS)}/v1"
            return stack.enter_context(openai.OpenAI(base_url=url, api_key="none", max_retries=0))

        yield connect


def prompt_of(engine: FakeEngine, index: int = -1) -> str:
    return bytes(token for token in engine.submitted[index].prompt() if token < 256).decode()


async def created(server: Any, **body: Any) -> Any:
    answer = await server.http.post("/v1/responses", json={"input": "hi", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_custom_tool_is_called_with_a_text(client: Callable[[str], openai.OpenAI]) -> None:
    """Red before: a tool of the type custom was a 400."""
    responses = client(called("apply_patch", {"input": INPUT})).responses
    answer = responses.create(model="default", input="hi", tools=[PATCH])
    (item,) = answer.output
    assert item.type == "custom_tool_call"
    assert (item.name, item.input) == ("apply_patch", INPUT)
    assert item.call_id.startswith("call_")
    events = list(responses.create(model="default", input="hi", tools=[PATCH], stream=True))
    names = [event.type.removeprefix("response.") for event in events]
    once = [name for index, name in enumerate(names) if names[index - 1] != name]
    assert once == [
        "created",
        "in_progress",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    deltas = [event.delta for event in events if event.type.endswith("input.delta")]
    assert "".join(deltas) == INPUT
    assert len(deltas) > 10, "it is streamed"
    (done,) = (event for event in events if event.type.endswith("input.done"))
    assert done.input == INPUT
    assert events[-1].response.output[0].input == INPUT


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input": ""}, ""),
        ({"input": "a\ud83d\ude42b"}, "a🙂b"),
        ({"patch": "a"}, "a"),
        ({"other": 1, "input": "a"}, "a"),
        ({"input": ["a"]}, '{"input": ["a"]}'),
        ({}, "{}"),
    ],
)
def test_the_text_of_a_custom_tool_is_found(serve: Serve, arguments: Any, text: str) -> None:
    async def scenario(server: Any) -> None:
        (item,) = (await created(server, tools=[PATCH]))["output"]
        assert item["input"] == text

    serve(scenario, says(called("apply_patch", arguments), context_len=ROOM), **PARSERS)


def test_the_model_sees_the_format_of_a_custom_tool(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await created(server, tools=[PATCH])
        prompt = prompt_of(server.engine)
        assert "Edits files." in prompt
        assert "*** Begin" in prompt
        assert any("tools[0].format" in warning for warning in answer["warnings"])
        assert answer["tools"] == [PATCH]
        text = {"type": "custom", "name": "say", "format": {"type": "text"}}
        assert "warnings" not in await created(server, tools=[text])

    serve(scenario, says("ok", context_len=ROOM), **PARSERS)


def test_a_regular_expression_constrains_the_text(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        form = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+|[0-9]"}
        tool = {"type": "custom", "name": "say", "format": form}
        answer = await created(server, tools=[tool])
        assert "warnings" not in answer
        constraint = server.engine.submitted[0].sampling.structural_tag
        (tag,) = json.loads(constraint)["format"]["tags"]
        schema = tag["content"]["json_schema"]
        assert schema["properties"]["input"]["pattern"] == "^(?:[a-z]+|[0-9])$"

    serve(scenario, says("ok", context_len=ROOM), **PARSERS)


def test_tools_in_a_namespace(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        first = await created(server, tools=[NAMESPACE])
        (item,) = first["output"]
        assert (item["type"], item["namespace"], item["name"]) == ("function_call", "crm", "find")
        assert "crm.find" in prompt_of(server.engine)
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "Ann"}
        again = {"tools": [NAMESPACE], "previous_response_id": first["id"]}
        await created(server, input=[output], **again)
        assert '"crm.find"' in prompt_of(server.engine).rpartition("assistant")[0]

    serve(scenario, says(called("crm.find", {"name": "A"}), context_len=ROOM), **PARSERS)


@pytest.mark.parametrize(
    ("tool", "name", "arguments", "key", "wanted"),
    [
        (
            LOCAL_SHELL,
            "local_shell",
            {"command": ["ls", "-l"], "timeout_ms": 5},
            "action",
            {
                "type": "exec",
                "command": ["ls", "-l"],
                "env": {},
                "timeout_ms": 5,
                "working_directory": None,
                "user": None,
            },
        ),
        (
            SHELL,
            "shell",
            {"commands": ["ls -l", "pwd"]},
            "action",
            {"commands": ["ls -l", "pwd"], "timeout_ms": None, "max_output_length": None},
        ),
        (
            {"type": "apply_patch"},
            "apply_patch",
            {"type": "update_file", "path": "a.py", "diff": "+x"},
            "operation",
            {"type": "update_file", "path": "a.py", "diff": "+x"},
        ),
    ],
)
def test_tools_with_items_of_their_own(
    client: Callable[[str], openai.OpenAI],
    tool: Any,
    name: str,
    arguments: Any,
    key: str,
    wanted: Any,
) -> None:
    responses = client(called(name, arguments)).responses
    (item,) = responses.create(model="default", input="hi", tools=[tool]).to_dict()["output"]
    assert (item["type"], item["status"], item[key]) == (f"{tool['type']}_call", "completed", wanted)  # fmt: skip
    events = list(responses.create(model="default", input="hi", tools=[tool], stream=True))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[2:] == ["output_item.added", "output_item.done", "completed"]
    assert events[3].item.to_dict()[key] == wanted


def test_arguments_that_make_no_item_are_those_of_a_function(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        (item,) = (await created(server, tools=[LOCAL_SHELL]))["output"]
        assert (item["type"], item["name"]) == ("function_call", "local_shell")
        assert json.loads(item["arguments"]) == {"command": "ls"}

    engine = says(called("local_shell", {"command": "ls"}), context_len=ROOM)
    serve(scenario, engine, **PARSERS)


@pytest.mark.parametrize(
    ("call", "output", "shown"),
    [
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "abc"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            ['"input":"abc"', "done"],
        ),
        (
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            {"type": "local_shell_call_output", "id": "c", "output": "a.py"},
            ['"command":["ls"]', "a.py"],
        ),
        (
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
            ['"commands":["ls"]', "a.py", '"exit_code":0'],
        ),
        (
            {"type": "apply_patch_call", "call_id": "c", "status": "completed", "operation": {"type": "delete_file", "path": "a.py"}},
            {"type": "apply_patch_call_output", "call_id": "c", "status": "failed", "output": "no such file"},
            ['"path":"a.py"', "failed", "no such file"],
        ),
        (
            {"type": "function_call", "call_id": "c", "namespace": "crm", "name": "find", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Ann"}]},
            ['"crm.find"', "Ann"],
        ),
    ],
)  # fmt: skip
def test_calls_and_outputs_go_back_to_the_model(
    serve: Serve, call: Any, output: Any, shown: list[str]
) -> None:
    async def scenario(server: Any) -> None:
        user = {"role": "user", "content": "hi"}
        first = await created(server, input=[user, call, output])
        for text in shown:
            assert text in prompt_of(server.engine)
        await created(server, input="and?", previous_response_id=first["id"])
        for text in shown:
            assert text in prompt_of(server.engine), "of a stored response, too"

    serve(scenario, says("ok", context_len=ROOM), **PARSERS)


def test_what_a_provider_runs_is_left_out_with_a_warning(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        hosted = [
            {"type": "web_search", "external_web_access": False},
            {"type": "image_generation"},
            {"type": "mcp", "server_label": "x", "server_url": "http://x"},
            {"type": "shell", "environment": {"type": "container_auto"}},
        ]
        answer = await created(server, tools=[*hosted, NAMESPACE])
        told = answer["warnings"]
        assert [each.partition(":")[0] for each in told] == [f"tools[{n}]" for n in range(4)]
        assert "web_search" in told[0]
        assert "crm.find" in prompt_of(server.engine)
        assert answer["tools"] == [*hosted, NAMESPACE]
        counted = await server.http.post(
            "/v1/responses/input_tokens", json={"input": "hi", "tools": hosted}
        )
        assert len(counted.json()["warnings"]) == 4

    serve(scenario, says("ok", context_len=ROOM), **PARSERS)


def test_tools_of_every_kind_can_be_chosen(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        tools = [PATCH, LOCAL_SHELL, NAMESPACE]
        for choice, name in (
            ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
            ({"type": "local_shell"}, "local_shell"),
            ({"type": "function", "name": "find"}, "crm.find"),
        ):
            await created(server, tools=tools, tool_choice=choice)
            text = server.engine.submitted[-1].sampling.structural_tag
            (tag,) = json.loads(text)["format"]["tags"]
            assert f'"{name}"' in tag["begin"]
        allowed = [choice, {"type": "local_shell"}, {"type": "web_search"}]
        choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
        await created(server, tools=tools, tool_choice=choice)
        text = server.engine.submitted[-1].sampling.structural_tag
        assert len(json.loads(text)["format"]["tags"]) == 2

    serve(scenario, says("ok", context_len=ROOM), **PARSERS)
