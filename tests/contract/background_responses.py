"""What tests of responses in the background share: the answers, and servers on one folder."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from answers import says

from conftest import serving
from setpoint.frontend.storage.storage import Storage
from setpoint_testing.fake_engine import FakeEngine

ROUTE = "/v1/responses"
ROOM = 4096
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "write"}
TEXTS = {
    "plain": ("Grüße, 世界! \U0001f600 Ende", {}),
    "stopped": ("one two STOP three", {"stop": ["STOP"]}),
    "calls": (
        'See.<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'
        '<tool_call>{"name": "write", "arguments": {"input": "a\\nb"}}</tool_call>',
        {"tools": [TOOL, CUSTOM]},
    ),
    "reasoning": ("<think>Well, é.</think>\n\nYes.", {}),
    "cut": ("No end in sight ", {"max_output_tokens": 40, "ignore_eos": True}),
}
OPTIONS: dict[str, Any] = {"reasoning_parser": "qwen3"}


def body_of(name: str, **more: Any) -> dict[str, Any]:
    return {"model": "default", "input": "hi", "background": True, **TEXTS[name][1], **more}


def engine_of(name: str, **options: Any) -> FakeEngine:
    return says(TEXTS[name][0], context_len=ROOM, **options)


async def events_of(server: Any, path: str, body: Any = None, **query: Any) -> list[Any]:
    """All events of a stream until it ends."""
    method = "GET" if body is None else "POST"
    answer = await server.http.request(method, path, json=body, params=query or None)
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


async def events_after(server: Any, own_id: str, after: int | None = None) -> list[Any]:
    query = {} if after is None else {"starting_after": after}
    return await events_of(server, f"{ROUTE}/{own_id}", stream="true", **query)


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(600):
        while not holds():
            await asyncio.sleep(0.001)


async def ended(server: Any, own_id: str) -> dict[str, Any]:
    async with asyncio.timeout(600):
        while True:
            found = (await server.http.get(f"{ROUTE}/{own_id}")).json()
            if found["status"] not in ("queued", "in_progress"):
                return dict(found)
            await asyncio.sleep(0.001)


async def begun(server: Any, body: dict[str, Any]) -> str:
    answer = (await server.http.post(ROUTE, json=body)).json()
    assert answer["status"] == "queued", answer
    return str(answer["id"])


@asynccontextmanager
async def server_on(folder: Path, engine: FakeEngine, **options: Any) -> AsyncIterator[Any]:
    with closing(Storage(folder)) as storage:
        async with serving(engine, storage=storage, **{**OPTIONS, **options}) as server:
            yield server


async def copied(server: Any, folder: Path, copy: Path) -> None:
    """Copy the folder of a server as it is between two writes."""
    await until(lambda: server.service.answering.responses.background._writer.done())
    shutil.copytree(folder, copy)


def timeless(value: Any) -> Any:
    """Without what differs between two runs of the same request: times, and ids."""
    if isinstance(value, dict):
        left_out = ("created_at", "completed_at", "id", "item_id", "call_id")
        return {key: timeless(each) for key, each in value.items() if key not in left_out}
    return [timeless(each) for each in value] if isinstance(value, list) else value
