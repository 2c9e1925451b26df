"""Ollama's routes for embeddings and for what clients ask about the model (docs/ollama.md)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from ollama_answers import lines, post

from setpoint.core.model import Pooling
from setpoint.frontend.apis.ollama.model_tags import OLLAMA_VERSION
from setpoint_testing.byte_tokenizer import CHAT_TEMPLATE
from setpoint_testing.specs import tiny_spec

Serve = Callable[..., None]
OTHER_MODEL = "The model 'llama3' is not served here; org/tiny answered."
POOLING = Pooling("last", normalize=True, size=4, lengths=(), why="")


def test_embeddings(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await post(server, "/api/embed", {"model": "default", "input": ["ab", "c"]})
        assert [len(each) for each in answer["embeddings"]] == [4, 4]
        assert (answer["model"], answer["prompt_eval_count"]) == ("org/tiny", 3)
        assert answer["total_duration"] > 0
        one = await post(server, "/api/embed", {"model": "default", "input": "ab", "dimensions": 2})
        assert [len(each) for each in one["embeddings"]] == [2]
        assert (await post(server, "/api/embed", {"model": "m", "input": []}))["embeddings"] == []
        old = await post(server, "/api/embeddings", {"model": "default", "prompt": "ab"})
        assert old == {"embedding": answer["embeddings"][0]}

    serve(scenario, pooling=POOLING)


def test_a_long_text_is_cut_or_refused(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        body = {"model": "default", "input": ["ab", "a" * 1000]}
        answer = await post(server, "/api/embed", body)
        assert answer["warnings"] == ["input[1] was cut to its first 250 tokens."]
        assert len(server.engine.submitted[1].prompt()) == 250
        refused = await server.http.post("/api/embed", json=body | {"truncate": False})
        assert refused.status_code == 400
        assert "longer than the model's context" in refused.json()["error"]

    serve(scenario, pooling=POOLING)


def test_what_clients_ask_about_the_model(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        (entry,) = (await server.http.get("/api/tags")).json()["models"]
        assert (entry["name"], entry["model"]) == ("org/tiny", "org/tiny")
        assert len(entry["digest"]) == 64
        assert entry["size"] == 2 * spec.num_parameters
        assert entry["details"] == {
            "parent_model": "",
            "format": "safetensors",
            "family": "llama",
            "families": ["llama"],
            "parameter_size": "1.0M",
            "quantization_level": "BF16",
        }
        shown = await post(server, "/api/show", {"model": "org/tiny:latest"})
        assert shown["details"] == entry["details"]
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["template"] == CHAT_TEMPLATE
        assert shown["modelfile"].startswith('FROM org/tiny\nTEMPLATE """')
        assert shown["modelfile"].endswith("PARAMETER num_ctx 256\n")
        assert shown["license"] == ""
        info = shown["model_info"]
        assert info["general.architecture"] == "llama"
        assert info["llama.context_length"] == 256
        assert info["general.parameter_count"] == spec.num_parameters
        assert "warnings" not in shown
        other = await post(server, "/api/show", {"name": "llama3"})
        assert other.pop("warnings") == [OTHER_MODEL]
        assert other == shown, "any name is answered for, as in a chat"
        (running,) = (await server.http.get("/api/ps")).json()["models"]
        assert (running["size_vram"], running["context_length"]) == (0, 256)
        assert running["size"] == round(0.875 * (1 << 30))
        assert datetime.fromisoformat(running["expires_at"]).year == 9999
        assert (await server.http.get("/api/version")).json()["version"] == OLLAMA_VERSION
        assert (await server.http.head("/")).status_code == 200

    spec = tiny_spec()
    serve(scenario, spec=spec, tool_call_parser="hermes", reasoning_parser="qwen3")


def test_all_routes_tell_the_present_weights(serve: Serve) -> None:
    """Red before: /api/pull and /api/show told those of the start."""

    async def scenario(server: Any) -> None:
        (before,) = (await server.http.get("/api/tags")).json()["models"]
        server.service.weights.tell("org/other", "2")
        (entry,) = (await server.http.get("/api/tags")).json()["models"]
        assert entry["digest"] != before["digest"]
        told = await lines(server, "/api/pull", {"model": "default"})
        assert told[1]["digest"] == f"sha256:{entry['digest']}"
        shown = await post(server, "/api/show", {"model": "default"})
        assert shown["modelfile"].startswith("FROM org/other\n")

    serve(scenario)


@pytest.mark.parametrize("name", ["default", "org/tiny", "org/tiny:latest"])
def test_what_is_served_need_not_be_pulled(serve: Serve, name: str) -> None:
    """Red before: a client that pulls its model before it chats failed."""

    async def scenario(server: Any) -> None:
        (entry,) = (await server.http.get("/api/tags")).json()["models"]
        told = await lines(server, "/api/pull", {"model": name})
        digest, size = f"sha256:{entry['digest']}", entry["size"]
        assert told == [
            {"status": "pulling manifest"},
            {
                "status": f"pulling {entry['digest'][:12]}",
                "digest": digest,
                "total": size,
                "completed": size,
            },
            {"status": "success"},
        ]
        body = {"name": name, "stream": False, "insecure": True}
        assert await post(server, "/api/pull", body) == {"status": "success"}

    serve(scenario, spec=tiny_spec())


def test_a_pull_of_another_model_says_which_one_answers(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        *_, told, last = await lines(server, "/api/pull", {"model": "llama3"})
        assert (told, last) == (
            {"status": f"nothing is downloaded: {OTHER_MODEL}"},
            {"status": "success", "warnings": [OTHER_MODEL]},
        )
        body = {"model": "llama3", "stream": False}
        answer = await post(server, "/api/pull", body)
        assert answer == {"status": "success", "warnings": [OTHER_MODEL]}
        missing = await server.http.post("/api/pull", json={})
        assert (missing.status_code, missing.json()) == (400, {"error": "model is missing."})

    serve(scenario)


def test_models_are_not_changed(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for method, path in (
            ("POST", "/api/push"),
            ("POST", "/api/create"),
            ("POST", "/api/copy"),
            ("DELETE", "/api/delete"),
            ("POST", "/api/blobs/sha256:0"),
        ):
            answer = await server.http.request(method, path, json={"model": "llama3"})
            assert answer.status_code == 400
            assert "only what it was started with" in answer.json()["error"]

    serve(scenario)


def test_unknown_paths_are_told_in_ollamas_shape(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.post("/api/chats", json={})
        assert (answer.status_code, answer.json()) == (
            404,
            {"error": "There is no route /api/chats; did you mean /api/chat?"},
        )

    serve(scenario)
