"""The routes about the storage of cached prefixes, over a simulated engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from setpoint.core.control import TierState
from setpoint.core.operations import AttachStorage, ClearStorage, DetachStorage

Serve = Callable[..., None]
ROUTE = "/hicache/storage-backend"
KEY = {"Authorization": "Bearer admin"}


def test_without_an_admin_key_the_storage_is_only_shown(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        shown = await server.http.get(ROUTE)
        assert shown.json() == {"hicache_storage_backend": None, "engines": [None]}
        for method, path in (("DELETE", ROUTE), ("POST", f"{ROUTE}/clear"), ("PUT", ROUTE)):
            refused = await server.http.request(
                method, path, json={"hicache_storage_backend": "file"}
            )
            assert refused.status_code == 400
            assert "--admin-api-key" in refused.json()["message"]
        assert not server.engine.operations

    serve(scenario)


@pytest.mark.parametrize("error", ["", "the index is locked"])
def test_a_storage_is_cleared_when_the_answer_says_so(serve: Serve, error: str) -> None:
    """Red before: the answer said so when the order had been given."""

    async def scenario(server: Any) -> None:
        server.engine.tiers = [
            TierState(backend="file", num_clearings=number) for number in (2, 1, 1)
        ]
        server.engine.tiers.append(TierState(backend="file", clear_error=error))
        answer = await server.http.post(f"{ROUTE}/clear", headers=KEY)
        assert len(server.engine.tiers) == 1
        assert answer.status_code == (503 if error else 200)
        assert error in answer.text

    serve(scenario, admin_api_key="admin")


def test_the_operator_changes_the_storage(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        http = server.http
        body = {
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config_json": '{"path": "/x"}',
        }
        keyless = await http.delete(ROUTE)
        assert keyless.status_code == 401
        assert "needs the admin key (--admin-api-key)" in keyless.text
        for answer in (
            await http.delete(ROUTE, headers=KEY),
            await http.put(ROUTE, headers=KEY, json=body),
            await http.post(f"{ROUTE}/clear", headers=KEY),
        ):
            assert answer.status_code == 200
            assert answer.json()["success"]
        assert server.engine.operations == [
            DetachStorage(),
            AttachStorage("file", '{"path": "/x"}'),
            ClearStorage(),
        ]
        wrong = await http.put(ROUTE, headers=KEY, json={"hicache_storage_backend": 3})
        assert wrong.status_code == 400

    serve(scenario, admin_api_key="admin")
