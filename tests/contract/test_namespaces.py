"""Every route makes the cache namespace of a request from extra_key and cache_salt, so that no two
pairs share one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from setpoint.core.model import Pooling
from setpoint_testing.fake_engine import EMBEDDING_SIZE

PAIRS = (
    (None, None),
    ("ab", None),
    (None, "ab"),
    ("ab", "c"),
    ("a", "bc"),
    ("1:a", None),
    ("", "1:a"),
)
TEXT = {
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
}
EMBEDDING = {"/v1/embeddings": {"input": "x"}, "/encode": {"text": "x"}}


def check(serve: Callable[..., None], route: str, body: dict[str, Any], **config: Any) -> None:
    async def scenario(server: Any) -> None:
        for key, salt in PAIRS:
            response = await server.http.post(
                route, json={**body, "extra_key": key, "cache_salt": salt}
            )
            assert response.status_code == 200, response.text
        found = [request.options.namespace for request in server.engine.submitted]
        assert found[0] == ""
        assert len(set(found)) == len(found) == len(PAIRS)

    serve(scenario, **config)


@pytest.mark.parametrize("route", TEXT)
def test_text_routes(serve: Callable[..., None], route: str) -> None:
    check(serve, route, TEXT[route])


@pytest.mark.parametrize("route", EMBEDDING)
def test_embedding_routes(serve: Callable[..., None], route: str) -> None:
    check(
        serve, route, EMBEDDING[route], pooling=Pooling("last", True, EMBEDDING_SIZE, None, "test")
    )
