"""What tests of Anthropic's routes send, and how they read a stream."""

from __future__ import annotations

import json
from typing import Any

from answers import HI

MESSAGES = "/v1/messages"
BODY = {"model": "default", "max_tokens": 100, "messages": HI}


def events_of(stream: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which has its type as its name."""
    events = []
    for block in stream.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def create(server: Any, **body: Any) -> dict[str, Any]:
    answer = await server.http.post(MESSAGES, json=BODY | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"]
    whole: dict[str, Any] = answer.json()
    return whole
