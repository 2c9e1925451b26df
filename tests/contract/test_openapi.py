"""``/openapi.json`` is a valid document that declares the body of every route that reads one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from jsonschema import Draft202012Validator

from setpoint.core.version import __version__

Serve = Callable[..., None]
FORMS = {"/v1/files"}
NO_BODY = {
    "/v1/classify",
    "/classify",
    "/flush_cache",
    "/freeze_gc",
    "/hicache/storage-backend/clear",
    "/stop_profile",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
    "/v1/batches/{batch_id}/cancel",
    "/v1/responses/{response_id}/cancel",
    *("/api/push", "/api/create", "/api/copy", "/api/blobs/{digest}"),
}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "$ref":
                yield item
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_the_document(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.get("/openapi.json")
        assert response.headers["content-type"] == "application/json"
        assert (await server.http.get("/openapi.json")).content == response.content
        document = response.json()
        assert document["openapi"] == "3.1.0"
        assert document["info"] == {"title": "Setpoint", "version": __version__}
        schemas = document["components"]["schemas"]
        for schema in schemas.values():
            Draft202012Validator.check_schema(schema)
        assert {
            reference.removeprefix("#/components/schemas/") for reference in references(document)
        } == schemas.keys()
        found = [
            (path, operation)
            for path, operations in document["paths"].items()
            for operation in operations.values()
        ]
        assert len({operation["operationId"] for _, operation in found}) == len(found)
        for path, operation in found:
            assert operation["tags"]
            assert operation["summary"]
            parameters = operation.get("parameters", [])
            assert operation["responses"].keys() == ({"200", "422"} if parameters else {"200"})
            in_path = [each["name"] for each in parameters if each["in"] == "path"]
            assert in_path == re.findall(r"{(\w+)}", path)
            for each in parameters:
                assert each["required"] == (each["in"] == "path")
                Draft202012Validator.check_schema(each["schema"])

    serve(scenario)


def test_every_body_is_declared(serve: Serve) -> None:
    """Red before: none was."""

    async def scenario(server: Any) -> None:
        document = (await server.http.get("/openapi.json")).json()
        declared = {}
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if method in ("post", "put") and path not in NO_BODY | FORMS:
                    reference = operation["requestBody"]["content"]["application/json"]["schema"][
                        "$ref"
                    ]
                    declared[path] = reference.rpartition("/")[2]
        assert declared == {
            "/generate": "GenerateBody",
            "/encode": "EncodeBody",
            "/tokenize": "TokenizeBody",
            "/v1/tokenize": "TokenizeBody",
            "/detokenize": "DetokenizeBody",
            "/v1/detokenize": "DetokenizeBody",
            "/abort_request": "AbortBody",
            "/api/chat": "OllamaChatBody",
            "/api/generate": "OllamaGenerateBody",
            "/api/embed": "EmbedBody",
            "/api/embeddings": "EmbeddingsBody",
            "/api/pull": "PullBody",
            "/api/show": "ShowBody",
            "/v1/score": "ScoreBody",
            "/v1/rerank": "RerankBody",
            "/v1/messages": "MessagesBody",
            "/v1/messages/count_tokens": "ConversationBody",
            "/set_internal_state": "SettingsBody",
            "/configure_logging": "LogSettingsBody",
            "/v1/batches": "BatchBody",
            "/fault_tolerance/apply": "ApplyBody",
            "/v1/fault_tolerance/apply": "ApplyBody",
            "/pause_generation": "PauseBody",
            "/continue_generation": "ContinueBody",
            "/release_memory_occupation": "MemoryBody",
            "/resume_memory_occupation": "MemoryBody",
            "/models/load": "LoadingBody",
            "/models/unload": "LoadingBody",
            "/update_weights_from_disk": "UpdateWeightsBody",
            "/update_weight_version": "WeightVersionBody",
            "/start_profile": "ProfileBody",
            "/hicache/storage-backend": "AttachBody",
            "/open_session": "OpenSessionBody",
            "/close_session": "CloseSessionBody",
            "/v1/responses": "ResponsesBody",
            "/v1/responses/input_tokens": "InputBody",
            "/parse_function_call": "ParseFunctionCallBody",
            "/separate_reasoning": "SeparateReasoningBody",
            "/v1/chat/completions": "ChatBody",
            "/v1/completions": "CompletionBody",
            "/v1/embeddings": "EmbeddingBody",
        }

    serve(scenario)


def test_schemas_say_what_is_needed_and_what_may_be_left_out(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        schemas = (await server.http.get("/openapi.json")).json()["components"]["schemas"]
        assert schemas["ChatBody"]["required"] == ["messages"]
        assert {"temperature", "max_tokens", "stream", "stop"} <= schemas["ChatBody"][
            "properties"
        ].keys()
        assert schemas["GenerateBody"].get("required", []) == []
        assert "$ref" in str(schemas["GenerateBody"]["properties"]["sampling_params"])
        assert {"type": "string"} in schemas["SamplingParams"]["properties"]["stop"]["anyOf"]

    serve(scenario)


def test_queries_are_described(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        operation = (await server.http.get("/openapi.json")).json()["paths"]["/v1/loads"]["get"]
        assert operation["operationId"] == "loads_v1_loads_get"
        assert operation["description"].startswith("The loads of the engines. dp_rank: ")
        assert operation["parameters"] == [
            {
                "name": "dp_rank",
                "in": "query",
                "required": False,
                "schema": {"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "Dp Rank"},
            },
            {
                "name": "include",
                "in": "query",
                "required": False,
                "schema": {"type": "string", "default": "all", "title": "Include"},
            },
            {
                "name": "format",
                "in": "query",
                "required": False,
                "schema": {"type": "string", "default": "json", "title": "Format"},
            },
        ]

    serve(scenario)


def test_the_pages_ask_for_the_document(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for path in ("/docs", "/redoc"):
            page = await server.http.get(path)
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            assert '"/openapi.json"' in page.text
            assert (await server.http.head(path)).status_code == 200
            assert (await server.http.post(path)).status_code == 405

    serve(scenario)
