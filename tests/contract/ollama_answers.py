"""What tests of Ollama's routes send, and how they read an answer."""

from __future__ import annotations

import json
from typing import Any

from answers import HI

CHAT = "/api/chat"
GENERATE = "/api/generate"
BODY = {"model": "org/tiny", "messages": HI, "stream": False}
ASK = {"model": "org/tiny", "prompt": "hi", "stream": False}


async def post(server: Any, route: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await server.http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


async def lines(server: Any, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await server.http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("}\n")
    return [json.loads(line) for line in answer.text.splitlines()]
