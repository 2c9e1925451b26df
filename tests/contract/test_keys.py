"""The keys: which one opens which route. Every route has a class here, so a new one needs a
decision."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from conftest import make_service
from setpoint.frontend.apis.dialects import DIALECTS
from setpoint.frontend.apis.sglang.missing import CONTROLS
from setpoint.frontend.http.app import create_app
from setpoint.frontend.http.auth import ApiKeyMiddleware
from setpoint_testing.fake_engine import FakeEngine

OPEN = {"/health", "/health_generate", "/ready", "/metrics", "/console", "/console/{name}"}
"""Need no key."""
ADMIN = {
    *("/flush_cache", "/abort_request", "/set_internal_state", "/configure_logging"),
    *("/start_profile", "/stop_profile", "/freeze_gc", "/pause_generation"),
    *("/continue_generation", "/release_memory_occupation", "/resume_memory_occupation"),
    *("/update_weights_from_disk", "/update_weight_version"),
    *("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter"),
    *("/hicache/storage-backend", "/hicache/storage-backend/clear"),
    *("/update_weights_from_tensor", "/update_weights_from_distributed"),
    *("/update_weights_from_ipc", "/begin_weight_update", "/end_weight_update"),
    *("/init_weights_update_group", "/destroy_weights_update_group"),
    "/init_weights_send_group_for_remote_instance",
    *("/send_weights_to_remote_instance", "/get_weights_by_name", "/weights_checker"),
    *("/start_expert_distribution_record", "/stop_expert_distribution_record"),
    *("/dump_expert_distribution_record", "/add_external_corpus", "/remove_external_corpus"),
    *("/pd_role_switch", "/set_trace_level", "/slow_down", "/dumper/{method}"),
    *("/models/load", "/models/unload", "/fault_tolerance/status", "/fault_tolerance/apply"),
    *("/v1/fault_tolerance/status", "/v1/fault_tolerance/apply"),
}
"""Need the admin's key, if there is one, and otherwise a client's."""
CLIENT = {
    *("/", "/docs", "/openapi.json", "/redoc", "/ping"),
    *("/api/blobs/{digest}", "/api/chat", "/api/copy", "/api/create", "/api/delete"),
    *("/api/embed", "/api/embeddings", "/api/generate", "/api/ps", "/api/pull", "/api/push"),
    *("/api/show", "/api/tags", "/api/version", "/classify", "/close_session"),
    *("/console/stream", "/detokenize", "/doctor", "/encode", "/generate", "/get_load"),
    *("/get_hicache_l3_cache_layout", "/get_model_info", "/get_server_info", "/invocations"),
    *("/get_remote_instance_transfer_engine_info", "/remote_instance_transfer_engine_info"),
    *("/list_external_corpora", "/model_info", "/open_session", "/parse_function_call"),
    *("/separate_reasoning", "/server_info", "/tokenize", "/tokenizer_info"),
    *("/v1/audio/transcriptions", "/v1/batches", "/v1/batches/{batch_id}"),
    *("/v1/batches/{batch_id}/cancel", "/v1/chat/completions", "/v1/classify"),
    *("/v1/completions", "/v1/decisions", "/v1/detokenize", "/v1/embeddings", "/v1/files"),
    *("/v1/files/{file_id}", "/v1/files/{file_id}/content", "/v1/loads", "/v1/messages"),
    *("/v1/messages/count_tokens", "/v1/models", "/v1/models/{model_id:path}"),
    *("/v1/realtime", "/v1/rerank", "/v1/responses", "/v1/responses/input_tokens"),
    *("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
    *("/v1/responses/{response_id}/input_items", "/v1/score", "/v1/systemone"),
    *("/v1/tokenize", "/vertex_generate"),
}
"""Need a key, if clients have one."""


NO_BRACES = str.maketrans("", "", "{}")


def app_of(api_keys: tuple[str, ...], admin: str | None) -> Any:
    service = make_service(FakeEngine(), api_keys=api_keys, admin_api_key=admin)
    return create_app(service, DIALECTS)


@cache
def routes() -> dict[str, set[str]]:
    """Path -> its methods."""
    found: dict[str, set[str]] = {}
    for route in app_of((), None).routes:
        found.setdefault(route.path, set()).update(route.methods)
    return found


def test_every_route_has_one_class() -> None:
    known = routes()
    assert set(known) == OPEN | ADMIN | CLIENT
    assert len(known) == len(OPEN) + len(ADMIN) + len(CLIENT)
    assert set(CONTROLS) <= ADMIN


def expected(path: str, keys: tuple[str, ...], admin: str | None, given: str | None) -> int:
    """The status that the keys give; 200: the route may answer."""
    if path in OPEN or (admin is not None and given == admin):
        return 200
    if path in ADMIN and admin is not None:
        return 403 if given in keys else 401
    return 200 if not keys or given in keys else 401


@pytest.mark.parametrize("admin", [None, "root"])
@pytest.mark.parametrize("keys", [(), ("one",), ("one", "two")])
def test_the_table_of_keys(keys: tuple[str, ...], admin: str | None) -> None:
    """All routes, methods and keys, in front of an application that answers everything with 200."""

    async def main() -> None:
        real = app_of(keys, admin)
        kinds = [each.cls for each in real.user_middleware]
        assert (ApiKeyMiddleware in kinds) == bool(keys or admin)
        app = ApiKeyMiddleware(
            PlainTextResponse("in"),
            api_keys=keys,
            admin_api_key=admin,
            dialects=real.state.dialects,
        )
        pages = (page for each in real.state.dialects.all for page in each.pages)
        page = next(page for page in pages if page.startswith("/console/"))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for path, methods in routes().items():
                url = page if path == "/console/{name}" else path.translate(NO_BRACES)
                for given in (None, "", "wrong", "one", "two", "root"):
                    want = expected(path, keys, admin, given)
                    headers = {} if given is None else {"authorization": f"Bearer {given}"}
                    for method in methods:
                        answer = await http.request(method, url, headers=headers)
                        assert answer.status_code == want, (method, path, headers)
                        is_told = answer.headers.get("www-authenticate") == "Bearer"
                        assert is_told == (want == 401)
                assert (await http.options(url)).status_code == 200

    asyncio.run(main())


def test_the_scheme_of_a_key_is_read_in_any_case() -> None:
    """Red before: 401."""

    async def main() -> None:
        transport = httpx.ASGITransport(app_of(("one",), None))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for scheme, status in (("bearer", 200), ("BEARER", 200), ("Basic", 401)):
                headers = {"authorization": f"{scheme} one"}
                assert (await http.get("/v1/models", headers=headers)).status_code == status

    asyncio.run(main())
