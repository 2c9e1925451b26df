"""Responses that a server keeps: those in the background, those that are forgotten, and the limits
of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from answers import says

from setpoint.frontend.storage.responses import KeptResponse, ResponseStore

Serve = Callable[..., None]
ROOM = 4096


def test_background(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        responses = server.openai.responses
        begun = await responses.create(model="default", input="hi", background=True)
        assert (begun.status, begun.background) == ("queued", True)
        seen = [begun.status]
        async with asyncio.timeout(20):
            while seen[-1] in ("queued", "in_progress"):
                answer = await responses.retrieve(begun.id)
                seen.append(answer.status)
                await asyncio.sleep(0.001)
        assert list(dict.fromkeys(seen)) == ["queued", "in_progress", "completed"]
        assert answer.output_text == "Hello"
        assert (await responses.cancel(begun.id)).status == "completed"
        begun = await responses.create(model="default", input="hi", background=True)
        while not server.engine.running:
            await asyncio.sleep(0)
        assert (await responses.cancel(begun.id)).status == "cancelled"
        assert not server.engine.running
        begun = await responses.create(model="default", input="hi", background=True)
        await responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(begun.id)
        plain = await responses.create(model="default", input="hi")
        with pytest.raises(openai.BadRequestError, match="does not run in the background"):
            await responses.cancel(plain.id)

    serve(scenario, says("Hello", context_len=ROOM, step_s=0.002))


def test_what_is_not_stored_or_deleted_is_not_there(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        responses = server.openai.responses
        unstored = await responses.create(model="default", input="hi", store=False)
        deleted = await responses.create(model="default", input="hi")
        await responses.delete(deleted.id)
        for own_id in (unstored.id, deleted.id, "resp_of_somebody_else", "resp_" * 100):
            with pytest.raises(openai.NotFoundError, match="previous_response_id: this server"):
                await responses.create(model="default", input="hi", previous_response_id=own_id)
            with pytest.raises(openai.NotFoundError):
                await responses.retrieve(own_id)
        for own_id in ("bad", "x" * 500):
            with pytest.raises(openai.BadRequestError, match="Invalid 'previous_response_id'"):
                await responses.create(model="default", input="hi", previous_response_id=own_id)
            for method in (responses.retrieve, responses.cancel, responses.delete):
                with pytest.raises(openai.BadRequestError, match="Invalid 'response_id'"):
                    await method(own_id)

    serve(scenario, says("Hello", context_len=ROOM))


def kept(own_id: str, text: str = "", status: str = "completed") -> KeptResponse:
    return KeptResponse(
        response={"id": own_id, "status": status, "output": [], "text": text}, inputs=[]
    )


def test_the_least_recently_used_responses_go_first() -> None:
    store = ResponseStore(max_responses=3, max_bytes=10_000)
    names = [f"resp_{letter}" for letter in "abcde"]
    for name in names[:3]:
        store.put(kept(name))
    store.get("resp_a")
    store.put(kept("resp_d"))
    assert [name for name in names if name in store] == ["resp_a", "resp_c", "resp_d"]
    store.put(kept("resp_e", "x" * 9_000))
    assert [name for name in names if name in store] == ["resp_e"]
    store.put(kept("resp_e", "x" * 11_000))
    assert "resp_e" not in store, "larger than everything together"


def test_empty_values_take_memory_too() -> None:
    store = ResponseStore(max_bytes=1_000_000)
    response = {"id": "a", "status": "completed", "output": []}
    store.put(KeptResponse(response=response, inputs=[{"x": [[]] * 100_000}]))
    assert "a" not in store, "300 kB of JSON, and megabytes of lists"


def test_a_running_response_is_not_dropped() -> None:
    store = ResponseStore(max_responses=2, max_bytes=10_000)
    store.put(kept("a", status="in_progress"))
    for name in "bcd":
        store.put(kept(name))
    assert [name for name in "abcd" if name in store] == ["a", "d"]
    store.put(kept("a"))
    store.put(kept("e"))
    assert [name for name in "ade" if name in store] == ["a", "e"]
