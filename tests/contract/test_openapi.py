"""``/openapi.json`` is a valid document that declares the body of every route that reads one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fastapi.openapi.models import OpenAPI

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
        for _ in range(2):  # the second is the one that the framework has kept
            document = (await server.http.get("/openapi.json")).json()
            OpenAPI.model_validate(document)
            schemas = document["components"]["schemas"]
            assert {
                reference.removeprefix("#/components/schemas/")
                for reference in references(document)
            } <= schemas.keys()
            assert "x-schemas" not in str(document)

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
