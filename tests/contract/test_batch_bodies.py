"""Requests to ``/v1/batches`` that cannot be honoured: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from setpoint.frontend.storage.storage import Storage

Serve = Callable[..., None]
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}'

REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"endpoint": "/v1/images"}, 400, "endpoint must be one of /v1/chat/completions"),
    ({"completion_window": "soon"}, 400, "completion_window must be hours or days"),
    ({"completion_window": "31d"}, 400, "completion_window must be hours or days"),
    ({"input_file_id": "file-1"}, 404, "There is no file 'file-1'"),
    ({"input_file_id": "../x"}, 404, "There is no file"),
    ({"input_file_id": None}, 400, "input_file_id must be a string"),
    ({"metadata": {"a": 1}}, 400, "metadata"),
    ({"metadata": {"a" * 65: "b"}}, 400, "metadata may have keys of at most 64"),
    ({"metadata": {str(n): "b" for n in range(17)}}, 400, "at most 16 keys"),
    ({"output_expires_after": {"anchor": "x"}}, 400, "output_expires_after.anchor"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "seconds must be"),
    ({"output_expires_after": []}, 400, "output_expires_after must be an object"),
]


def test_bodies_that_cannot_be_honoured(serve: Serve, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        file = await server.openai.files.create(file=("a", LINE), purpose="batch")
        good = {
            "input_file_id": file.id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        for changes, status, message in REFUSED:
            answer = await server.http.post("/v1/batches", json=good | changes)
            assert answer.status_code == status, changes
            assert message in answer.json()["error"]["message"]
        assert (await server.openai.batches.list()).data == []

    serve(scenario, storage=Storage(tmp_path))


def test_a_file_of_another_purpose_and_an_unknown_batch(serve: Serve, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        file = await server.openai.files.create(file=("a", b"x"), purpose="user_data")
        with pytest.raises(openai.BadRequestError, match="has the purpose 'user_data'"):
            await server.openai.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
        for call in (server.openai.batches.retrieve, server.openai.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="There is no batch 'batch_1'"):
                await call("batch_1")

    serve(scenario, storage=Storage(tmp_path))
