"""The routes that a server with several models refuses, and what each says instead."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from conftest import make_service
from setpoint.frontend.apis.dialects import DIALECTS
from setpoint.frontend.http.app import create_app
from setpoint.frontend.http.model_choice import ModelChoice
from setpoint_testing.fake_engine import FakeEngine


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/release_memory_occupation", "Use /models/load and /models/unload."),
        ("/update_weights_from_disk", "cannot update weights while it runs. Start it again with"),
        ("/fault_tolerance/apply", "/pause_generation?model=NAME pauses a model."),
    ],
)
def test_a_refused_route_names_what_does_the_same(path: str, words: str) -> None:
    """Red before: all three named /models/load, which updates no weights and pauses nothing."""

    async def scenario() -> None:
        dialects = create_app(make_service(FakeEngine()), DIALECTS).state.dialects
        app: Any = ModelChoice(
            PlainTextResponse("a"),
            first="a",
            others={"b": PlainTextResponse("b")},
            max_body_bytes=1 << 20,
            dialects=dialects,
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            answer = await http.post(f"{path}?model=b", json={})
            assert answer.status_code == 400
            assert words in answer.text

    asyncio.run(scenario())
