"""Memory and weights of a running engine over HTTP, and who may ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from setpoint.core.control import PauseMode
from setpoint.core.errors import RequestError
from setpoint.core.operations import LoadWeights, MemoryPart, ReleaseMemory, RestoreMemory
from setpoint.frontend.checkpoint_names import Checkpoint
from setpoint_testing.fake_engine import FakeEngine

Serve = Callable[..., None]
KV, WEIGHTS, GRAPH = MemoryPart.KV_CACHE, MemoryPart.WEIGHTS, MemoryPart.CUDA_GRAPH
UPDATE = "/update_weights_from_disk"


class Found:
    """Knows one checkpoint."""

    def license(self) -> str:
        return ""

    def find(self, model_path: str, load_format: str | None) -> Checkpoint:
        if model_path != "new":
            raise RequestError("model_path must name a folder.", status_code=403)
        return Checkpoint("/folder/new", load_format or "auto")


def test_release_and_resume(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        http, engine = server.http, server.engine
        answer = await http.post("/release_memory_occupation", json={})
        assert answer.json() == {"released": ["kv_cache", "weights", "cuda_graph"]}
        engine.released = (MemoryPart.KV_CACHE, MemoryPart.WEIGHTS)
        assert (await http.post("/release_memory_occupation", json={})).json() == {
            "released": ["cuda_graph"]
        }
        body = {"tags": ["weights", "kv_cache", "weights"]}
        assert (await http.post("/resume_memory_occupation", json=body)).status_code == 200
        assert (await http.post("/resume_memory_occupation", json={})).status_code == 200
        assert engine.operations == [
            ReleaseMemory([KV, WEIGHTS, GRAPH]),
            ReleaseMemory([GRAPH]),
            RestoreMemory([WEIGHTS, KV]),
            RestoreMemory([KV, WEIGHTS]),
        ]
        engine.released = tuple(MemoryPart)
        again = await http.post("/release_memory_occupation", json={})
        assert again.status_code == 400
        assert "already released" in again.json()["message"]
        engine.refuse_operation = "An engine is not idle: 3 requests are open."
        refused = await http.post("/resume_memory_occupation", json={"tags": ["weights"]})
        assert refused.status_code == 400
        assert refused.json()["message"] == engine.refuse_operation

    serve(scenario)


def test_requests_are_refused_while_released_weights_cannot_be_restored(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        http, engine = server.http, server.engine
        await http.post("/release_memory_occupation", json={"tags": ["weights", "kv_cache"]})
        engine.released = (KV, WEIGHTS)
        assert (await http.get("/ready")).status_code == 200
        engine.silent = True
        waiting = asyncio.create_task(http.post("/generate", json={"text": "a"}))
        await asyncio.sleep(0.05)
        engine.silent = False
        engine.refuse_operation = "The content of m.gguf has changed."
        for tags, is_lost in ((["kv_cache"], False), (["weights"], True)):
            refused = await http.post("/resume_memory_occupation", json={"tags": tags})
            assert refused.status_code == 400
            assert ((await http.get("/ready")).status_code == 503) == is_lost
        reason = "The model has no weights: The content of m.gguf has changed."
        finish = (await asyncio.wait_for(waiting, 5)).json()["meta_info"]["finish_reason"]
        assert (finish["type"], finish["message"]) == ("abort", reason)
        assert (await http.get("/ready")).text == f"{reason}\n"
        answer = await http.post("/generate", json={"text": "a"})
        assert (answer.status_code, answer.json()["message"]) == (503, reason)
        engine.refuse_operation = ""
        assert (await http.post("/resume_memory_occupation", json={})).status_code == 200
        assert (await http.get("/ready")).status_code == 200
        assert (await http.post("/generate", json={"text": "a"})).status_code == 200

    serve(scenario)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/release_memory_occupation", {"tags": ["everything"]}, "tags"),
        ("/release_memory_occupation", {"tags": "weights"}, "tags"),
        ("/release_memory_occupation", {"tags": []}, "tags"),
        ("/resume_memory_occupation", {"tags": [1]}, "tags"),
        (UPDATE, {}, "model_path"),
        (UPDATE, {"model_path": 3}, "model_path"),
        (UPDATE, {"model_path": "new", "flush_cache": "yes"}, "flush_cache"),
        (UPDATE, {"model_path": "new", "weight_version": "v" * 2000}, "weight_version"),
        ("/update_weight_version", {"new_version": None}, "new_version"),
        ("/update_weight_version", {"new_version": "v" * 2000}, "new_version"),
    ],
)
def test_wrong_bodies_are_refused(serve: Serve, path: str, body: Any, words: str) -> None:
    async def scenario(server: Any) -> None:
        response = await server.http.post(path, json=body)
        assert response.status_code == 400
        assert words in response.json()["message"]
        assert not server.engine.operations

    serve(scenario, checkpoints=Found())


def test_an_update_shows_in_every_answer(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        http = server.http
        body = {"model_path": "new", "weight_version": "step-7", "load_format": "safetensors"}
        answer = await http.post(UPDATE, json=body)
        assert answer.status_code == 200
        assert answer.json() == {
            "success": True,
            "message": "Succeeded to update model weights.",
            "num_paused_requests": 0,
        }
        assert server.engine.operations == [
            LoadWeights("/folder/new", "safetensors", flush_cache=True)
        ]
        info = (await http.get("/model_info")).json()
        assert (info["model_path"], info["weight_version"]) == ("new", "step-7")
        out = await server.generate(text="abc", sampling_params={"max_new_tokens": 1})
        assert out["meta_info"]["weight_version"] == "step-7"
        chat = await server.openai.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "hi"}], max_tokens=2
        )
        assert chat.model_dump()["metadata"]["weight_version"] == "step-7"
        answer = await http.post("/update_weight_version", json={"new_version": "step-8"})
        assert answer.json()["success"]
        assert (await http.get("/model_info")).json()["weight_version"] == "step-8"

    serve(scenario, checkpoints=Found())


@pytest.mark.parametrize("why", ["path", "engine"])
def test_a_failed_update_changes_nothing(serve: Serve, why: str) -> None:
    async def scenario(server: Any) -> None:
        server.engine.refuse_operation = "tensor x has another shape" if why == "engine" else ""
        name = "new" if why == "engine" else "/etc"
        body = {"model_path": name, "weight_version": "v2", "abort_all_requests": True}
        answer = await server.http.post(UPDATE, json=body)
        assert answer.status_code == (400 if why == "engine" else 403)
        assert answer.json()["success"] is False
        assert answer.json()["num_paused_requests"] == 0
        assert server.engine.paused is None
        info = (await server.http.get("/model_info")).json()
        assert (info["model_path"], info["weight_version"]) == ("org/tiny", "default")

    serve(scenario, checkpoints=Found())


@pytest.mark.parametrize("keep", [True, False])
def test_an_update_may_abort_what_runs(serve: Serve, keep: bool) -> None:
    async def scenario(server: Any) -> None:
        running = asyncio.create_task(
            server.generate(text="abc", sampling_params={"max_new_tokens": 100})
        )
        while not server.engine.running:
            await asyncio.sleep(0.001)
        body = {"model_path": "new", "abort_all_requests": True, "keep_pause": keep}
        assert (await server.http.post(UPDATE, json=body)).status_code == 200
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        assert server.engine.paused == (PauseMode.ABORT if keep else None)

    serve(scenario, FakeEngine(step_s=0.002), checkpoints=Found())


def test_an_update_of_an_idle_server_may_leave_it_paused(serve: Serve) -> None:
    """Red before: the pause was kept only beside abort_all_requests."""

    async def scenario(server: Any) -> None:
        body = {"model_path": "new", "keep_pause": True}
        assert (await server.http.post(UPDATE, json=body)).status_code == 200
        assert server.engine.paused == PauseMode.RETRACT
        assert server.service.engine.orders.paused == {0: PauseMode.RETRACT}

    serve(scenario, checkpoints=Found())


def test_a_server_without_checkpoints_refuses(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        answer = await server.http.post(UPDATE, json={"model_path": "org/tiny"})
        assert answer.status_code == 400

    serve(scenario)


ADMIN = (
    *("/flush_cache", "/pause_generation", "/release_memory_occupation", UPDATE),
    *("/fault_tolerance/apply", "/v1/fault_tolerance/apply"),
)


@pytest.mark.parametrize("keys", [("client", "admin"), (None, "admin"), ("client", None)])
def test_keys(serve: Serve, keys: tuple[str | None, str | None]) -> None:
    """Routes that change the server need the admin's key, if there is one."""
    client, admin = keys

    async def scenario(server: Any) -> None:
        async def status(path: str, key: str | None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            if path == "/v1/models":
                return int((await server.http.get(path, headers=headers)).status_code)
            return int((await server.http.post(path, json={}, headers=headers)).status_code)

        for path in ADMIN:
            own = client if admin is None else admin
            assert await status(path, own) in (200, 400)
            assert await status(path, None) == 401
            assert await status(path, "wrong") == 401
            if admin is not None and client is not None:
                assert await status(path, client) == 403
        assert await status("/v1/models", client) == 200
        assert await status("/v1/models", None) == (200 if client is None else 401)
        if admin is not None:
            assert await status("/v1/models", admin) == 200

    serve(scenario, api_key=client, admin_api_key=admin)
