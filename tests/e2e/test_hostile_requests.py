"""Requests that ask for what cannot be, over real HTTP into a live engine: each is refused by name
in its dialect's shape, and while they are sent the server stays ready and other streams go on."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from extreme_values import EXPRESSIONS, GRAMMARS, HI, LOOP, SCHEMAS, TOOL, TOOLS, nested

from setpoint_testing.server_process import PATIENCE_S, ServerProcess, running_server


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": HI, "max_tokens": 4, **fields}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}


def generate(**sampling: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 4, **sampling}}


def responses(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": "a", "max_output_tokens": 4, **fields}


def messages(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"model": "m", "messages": HI, "max_tokens": 4, **fields}


RESULT = {"role": "tool", "tool_call_id": "nobody", "content": "a"}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}
ANTHROPIC_RESULT = {"type": "tool_result", "tool_use_id": "nobody", "content": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,?garbage?"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "?garbage?"}
MEGABYTE = 1 << 20

REFUSED: dict[str, tuple[tuple[str, dict[str, Any]], int, str]] = {
    "a schema that nothing matches": (chat(response_format=schema(False)), 400, "json_schema|schema"),
    "a regex that nothing matches": (generate(regex="a&b[^\\s\\S]"), 400, "regex"),
    "a grammar that never ends": (generate(ebnf="root ::= root"), 400, "ebnf"),
    "an empty grammar": (generate(ebnf=" "), 400, "ebnf"),
    "$ref in a loop": (chat(response_format=schema(LOOP)), 400, "json grammar"),
    "$ref to nowhere": (chat(response_format=schema({"$ref": "#/no"})), 400, "json grammar"),
    "a regex of 1 MB": (generate(regex="(ab|cd)" * (MEGABYTE // 7)), 400, "regex"),
    "a stop_regex of 1 MB": (generate(stop_regex="(ab|cd)" * (MEGABYTE // 7)), 400, "stop_regex"),
    "a grammar of 1 MB": (generate(ebnf='root ::= "a"\n' + '| "b"' * 200_000), 400, "ebnf"),
    "a schema 200 deep": (chat(response_format=schema(nested(200))), 400, "inside each other"),
    "a schema 200 deep, of a tool": (
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": nested(200)}}], tool_choice="required"),
        400,
        "inside each other",
    ),
    "a schema 200 deep, /generate": (generate(json_schema=json.dumps(nested(200))), 400, "json grammar"),
    "two tools of one name": (chat(tools=[TOOL, TOOL]), 400, "'?f'?"),
    "two tools of one name, messages": (messages(tools=[ANTHROPIC_TOOL] * 2), 400, "'?f'?"),
    "two tools of one name, responses": (
        responses(tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}}] * 2),
        400,
        "'?f'?",
    ),
    "a choice of a tool that is not there": (
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        400,
        "g",
    ),
    "a tool's result without its call": (chat(messages=[*HI, RESULT]), 400, "tool"),
    "a tool's result without its call, messages": (
        messages(messages=[{"role": "user", "content": [ANTHROPIC_RESULT]}]),
        400,
        "tool",
    ),
    "a call's output without the call, responses": (
        responses(input=[{"type": "function_call_output", "call_id": "nobody", "output": "a"}]),
        400,
        "call",
    ),
    "a user without content": (chat(messages=[{"role": "user"}]), 400, "content"),
    "no messages": (chat(messages=[]), 400, "messages"),
    "no messages, messages": (messages(messages=[]), 400, "messages"),
    "base64 garbage": (
        chat(messages=[{"role": "user", "content": [IMAGE]}]),
        400,
        "image",
    ),
    "base64 garbage, messages": (
        messages(messages=[{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]),
        400,
        "image",
    ),
    "base64 garbage as images, Ollama": (
        ("/api/chat", {"model": "m", "messages": [{**HI[0], "images": ["?garbage?"]}]}),
        400,
        "images",
    ),
    "base64 garbage as embeds": (
        ("/generate", {"input_embeds": "?garbage?", "sampling_params": {"max_new_tokens": 2}}),
        400,
        "input_embeds",
    ),
    "previous_response_id of nobody": (responses(previous_response_id="resp_0"), 404, "resp_0"),
    "a file of nobody": (
        ("/v1/batches", {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"}),
        404,
        "file-0",
    ),
    "a profile of nothing": (("/start_profile", {"activities": ["GPU"]}), 400, "activities"),
    "two constraints": (generate(regex="a", ebnf='root ::= "a"'), 400, "regex|ebnf"),
    "an unknown response_format": (chat(response_format={"type": "yaml"}), 400, "response_format"),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home = tmp_path_factory.mktemp("hostile")
    files = ("--file-storage-path", str(home / "files"))
    sizes = ("--dtype", "float32", "--num-threads", "1", "--max-total-tokens", "8192")
    arguments = ("--model-path", str(tiny_model), *sizes, *files, "--strict-accounting")
    with running_server(home, *arguments) as started:
        yield started


class Beside:
    """A stream that runs, and somebody who asks again and again whether the server is ready. If
    either has to wait longer than PATIENCE_S, its thread raises, which fails the test."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._is_over = threading.Event()
        self.status_codes: set[int] = set()
        self._threads = [threading.Thread(target=work) for work in (self._ask, self._stream)]

    def __enter__(self) -> Beside:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=PATIENCE_S) as http:
            while not self._is_over.wait(0.05):
                self.status_codes.add(http.get(f"{self._server.url}/ready").status_code)

    def _stream(self) -> None:
        body = {
            "text": "a",
            "stream": True,
            "sampling_params": {"max_new_tokens": 3900, "ignore_eos": True},
        }
        while not self._is_over.is_set():
            with httpx.stream(
                "POST", f"{self._server.url}/generate", json=body, timeout=PATIENCE_S
            ) as stream:
                for _ in stream.iter_lines():
                    if self._is_over.is_set():
                        return


def message_of(path: str, answer: httpx.Response) -> str:
    """The reason, from where the dialect has it."""
    content = answer.json()
    if path.startswith("/api/"):
        return str(content["error"])
    if path.startswith("/v1/messages"):
        assert content["type"] == "error"
    else:
        assert content["object"] == "error"
    return str(content["error"]["message"])


@pytest.mark.cases(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_hostile_requests_are_refused_by_name_and_hold_up_nobody(
    server: ServerProcess, stream: bool
) -> None:
    wrong = {}
    with Beside(server) as beside, httpx.Client(timeout=PATIENCE_S) as http:
        for case, ((path, body), status, named) in REFUSED.items():
            answer = http.post(server.url + path, json=body | ({"stream": True} if stream else {}))
            message = message_of(path, answer) if answer.status_code >= 400 else answer.text
            is_refused = answer.status_code == status and re.search(named, message)
            if not is_refused or len(message) > 2000:
                wrong[case] = (answer.status_code, message[:500])
    assert wrong == {}
    assert beside.status_codes == {200}
    assert not server.engine_is_gone()
    assert "Traceback" not in server.errors


COSTLY = {
    **{f"schema {at}": chat(response_format=schema(each)) for at, each in enumerate(SCHEMAS)},
    **{f"regex {at}": generate(regex=each) for at, each in enumerate(EXPRESSIONS)},
    **{f"stop_regex {at}": generate(stop_regex=each) for at, each in enumerate(EXPRESSIONS)},
    **{f"grammar {at}": generate(ebnf=each) for at, each in enumerate(GRAMMARS)},
    **{f"tools {at}": chat(tools=each, tool_choice="required") for at, each in enumerate(TOOLS)},
    "10,000 messages": chat(messages=HI * 10_000),
    "10,000 parts": chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 10_000}]
    ),
    "nested repetitions": generate(regex="(((((a{30}){30}){30}){30}){30}){30}"),
    "alternatives that begin alike": generate(regex="|".join(["ab" * 50 + "c"] * 2000)),
    "a long stop string that nearly comes": generate(stop=["\x00" * 60_000]),
}
"""What may be honoured, but could cost much."""


@pytest.mark.full
@pytest.mark.timeout(300)
def test_what_could_cost_much_holds_up_nobody(server: ServerProcess) -> None:
    wrong = {}
    with Beside(server) as beside, httpx.Client(timeout=PATIENCE_S) as http:
        for case, (path, body) in COSTLY.items():
            answer = http.post(server.url + path, json=body)
            if answer.status_code not in (200, 400):
                wrong[case] = (answer.status_code, answer.text[:300])
    assert wrong == {}
    assert beside.status_codes == {200}
    assert not server.engine_is_gone()
    assert "Traceback" not in server.errors
